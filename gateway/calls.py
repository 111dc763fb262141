"""A client's request, of any protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.auth.caller import LOCAL, Caller
from outrider.gateway.limits import Admission
from outrider.gateway.resume import Resumption
from outrider.text.input_processor import ProcessorInput


@dataclass(slots=True)
class Call:
    """`params` are the given sampling parameters, by the names of `SamplingParams`; the others get
    the model's defaults."""

    prompt: ProcessorInput
    params: Mapping[str, Any]
    caller: Caller = LOCAL
    owner: str = ""  # for fair sharing: the key, or the client's address where there are no keys
    admission: Admission = field(default_factory=Admission)
    model: str = ""
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""  # the client's own: requests share KV blocks only under equal salts
    deadline_s: float | None = None  # on the clock of time.monotonic
    resumable: bool = False  # the engine holds it for a while if its connection is lost
    digest: bytes = b""  # of the request as it was sent, where it may be resumed
    resumption: Resumption | None = None  # what the client has of it already
    protocol: str = "grpc"  # as the access log calls it
    label: str = ""  # the client's own name for it, as X-Request-Id; only logged

    def release(self) -> None:
        """Drop the prompt as it was sent: the prepared request has its tokens."""
        self.prompt, self.params, self.resumption = "", {}, None
