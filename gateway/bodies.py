"""Large bodies of JSON, parsed in child processes: parsers keep the interpreter to themselves, and
with it every stream of a gateway."""

from __future__ import annotations

from typing import Any

from outrider.config import ServerConfig
from outrider.errors import FieldRefusedError, RequestError
from outrider.gateway.preparing import Preparing
from outrider.links.gateway_messages import EngineFacts
from outrider.text import bodies
from outrider.text.children import ChildError, Children

# A body of millions of bytes takes a tenth of a second.
NUM_CHILDREN, MAX_PENDING = 2, 64
TIMEOUT_S, MEMORY_BYTES = 10.0, 256 * 2**20


class Bodies:
    """A few children and a queue before them, both bounded."""

    def __init__(self, config: ServerConfig) -> None:
        self._children = Children("body", TIMEOUT_S, MEMORY_BYTES + 16 * config.max_body_bytes)
        self._threads = Preparing("parse", NUM_CHILDREN, MAX_PENDING)

    async def parse(
        self,
        owner: str,
        body: bytes | bytearray,
        known: list[str],
        facts: EngineFacts,
        deadline_s: float | None,
    ) -> dict[str, Any]:
        """The fields of a body that has those of the names that requests know, for a model of which
        these are the facts."""
        asked = bodies.question(body, known, facts.max_model_len, facts.vocab_size)
        try:
            found = await self._threads.run(owner, deadline_s, self._children.ask, asked)
        except ChildError as error:
            raise RequestError(f"the body cannot be parsed ({error}); send less at once.") from None
        if "fields" in found:
            fields: dict[str, Any] = found["fields"]
            return fields
        if found["param"]:
            raise FieldRefusedError(found["param"], found["refused"])
        raise RequestError(found["refused"])

    def close(self) -> None:
        self._threads.close()
        self._children.close()
