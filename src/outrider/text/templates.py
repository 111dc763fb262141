"""Renders clients' chat templates and long conversations in subprocesses that can be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.text.subprocess_pool import SubprocessPool

TIMEOUT_S = 2.0
MEMORY_BYTES = 256 * 2**20


class TemplateProcesses(SubprocessPool):
    """Renders in subprocesses."""

    def __init__(self, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        super().__init__("render", timeout_s, memory_bytes)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        values: Mapping[str, Any],
    ) -> str:
        """The text, or `SubprocessTaskError`. `values` are further variables of the template."""
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
