"""Large JSON bodies, parsed in child processes: a parser holds the GIL, which would block every
stream of the gateway."""

from __future__ import annotations

from typing import Any

from outrider.config import ServerConfig
from outrider.errors import FieldRefusedError, RequestError
from outrider.gateway.fair_pool import FairThreadPool
from outrider.links.gateway_messages import EngineFacts
from outrider.text import json_bodies
from outrider.text.subprocess_pool import SubprocessPool, SubprocessTaskError

# A body of millions of bytes takes a tenth of a second.
NUM_CHILDREN, MAX_PENDING = 2, 64
TIMEOUT_S, MEMORY_BYTES = 10.0, 256 * 2**20


class BodyParser:
    """A few child processes with a bounded queue."""

    def __init__(self, config: ServerConfig) -> None:
        self._children = SubprocessPool(
            "body", TIMEOUT_S, MEMORY_BYTES + 16 * config.max_body_bytes
        )
        self._threads = FairThreadPool("parse", NUM_CHILDREN, MAX_PENDING)

    async def parse(
        self,
        owner: str,
        body: bytes | bytearray,
        known: list[str],
        facts: EngineFacts,
        deadline_s: float | None,
    ) -> dict[str, Any]:
        """The fields of a body; `known` are the names of the schema, `facts` those of the model."""
        query = json_bodies.question(body, known, facts.max_model_len, facts.vocab_size)
        try:
            found = await self._threads.run(owner, deadline_s, self._children.ask, query)
        except SubprocessTaskError as error:
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
