"""Chat templates of strangers, and long conversations, rendered where that can be stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.text.children import Children

TIMEOUT_S = 2.0
MEMORY_BYTES = 256 * 2**20


class TemplateProcesses(Children):
    """Renders in children."""

    def __init__(self, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        super().__init__("render", timeout_s, memory_bytes)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        values: Mapping[str, Any],
    ) -> str:
        """The text, or `ChildError`. `values` are further ones that the template sees."""
        return str(
            self.ask(
                {
                    "template": template,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "values": dict(values),
                }
            )
        )
