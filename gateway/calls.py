"""A request as a client made it, of whatever protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.caller import LOCAL, Caller
from outrider.gateway.limits import Admission
from outrider.gateway.resume import Resumption
from outrider.text.front_door import Prompt
from outrider.text.messages import Conversation


@dataclass(slots=True)
class Call:
    """`params` are those that were given, by the names of `SamplingParams`; what is left out gets
    the model's default."""

    prompt: Prompt | Conversation
    params: Mapping[str, Any]
    caller: Caller = LOCAL
    owner: str = ""  # whom its work counts for: the key, or the address where there are no keys
    admission: Admission = field(default_factory=Admission)
    model: str = ""
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""  # the client's own: requests share cached prompts only under equal ones
    deadline_s: float | None = None  # on the clock of time.monotonic
    resumable: bool = False  # goes on for a while without its connection
    digest: bytes = b""  # of the request as it was sent, where it may be resumed
    resumption: Resumption | None = None  # what the client has of it already
    protocol: str = "grpc"  # as the access log calls it
    label: str = ""  # the client's own name for it, as X-Request-Id; only logged

    def release(self) -> None:
        """Keep nothing of what was sent: once a request is prepared it is tokens."""
        self.prompt, self.params, self.resumption = "", {}, None
