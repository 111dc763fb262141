"""The protocol-independent interface of a target."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from outrider.errors import ConfigError
from outrider.loadtest.plain import plain
from outrider.loadtest.records import CountedBy, RequestSpeculation
from outrider.loadtest.requests import BenchRequest

MAX_CHANNELS = 1024
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class TargetFault(Exception):
    """A failed request: `kind` groups failures, and the message is made safe to print."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(plain(message))
        self.kind = kind


@dataclass(slots=True)
class Reply:
    """A reply, filled in as it arrives, so that partial replies are kept on failure."""

    sent_s: float = 0.0
    update_s: list[float] = field(default_factory=list)
    update_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = CountedBy.UNKNOWN
    finish: str | None = None
    retries: int = 0
    speculated: RequestSpeculation | None = None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def sending(self) -> None:
        """Records the time of sending."""
        self.sent_s = time.monotonic()

    def update(self, num_tokens: int | None) -> None:
        """Records an update with tokens; None if only the total will be known."""
        self.update_s.append(time.monotonic() - self.sent_s)
        if num_tokens is not None:
            self.update_tokens.append(num_tokens)
            self.output_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Where and how an arm sends its requests; pickled to the client processes.

    `extras` go into every request of the arm unchanged: fields of the HTTP body, or parameters of
    `SamplingParams` (`speculation`, `num_speculative_tokens`, ...) over gRPC and in process.
    Rejects header injection and secrets in addresses, without repeating the value.
    """

    url: str  # grpc://host:port, http(s)://host:port[/v1], or inprocess:
    model: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False  # do not check the certificate
    tokenizer: str | None = None  # counts tokens if the server does not
    keeps_text: bool = False
    retries: int = 0  # of requests rejected with 429 or 503
    channels: int = 8  # gRPC connections; HTTP opens connections as needed

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not isinstance(name, str) or _HEADER_NAME.fullmatch(name) is None:
                raise ConfigError(f"{name!r} is not a header name; use letters, digits and '-'.")
            if not isinstance(value, str) or not _is_one_line(value):
                raise ConfigError(f"the header {name} must be one line of ASCII text; change it.")
        if self.api_key is not None and not _is_one_line(self.api_key):
            raise ConfigError(
                "the API key holds a line break or a character that is not ASCII; remove it."
            )
        if type(self.channels) is not int or not 1 <= self.channels <= MAX_CHANNELS:
            raise ConfigError(
                f"channels is {self.channels!r}; give a whole number from 1 to {MAX_CHANNELS}."
            )
        if _has_user(self.url):
            raise ConfigError(
                "an arm's address holds a user or a password, and addresses are kept in the "
                "report; give a header Authorization instead."
            )

    def at(self, url: str) -> TargetSpec:
        """The same target at another address."""
        return dataclasses.replace(self, url=url)


def _is_one_line(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _has_user(url: str) -> bool:
    try:
        return "@" in urlsplit(url).netloc
    except ValueError:  # `make_target` reports it
        return False


class Target(Protocol):
    """A server as used by one client process. All methods run on that process's event loop."""

    # Stays open across shifts, e.g. an in-process engine that would reload its weights.
    outlives_shifts: bool

    async def open(self) -> None:
        """Connects; raises `TargetFault` if the server does not answer within seconds."""

    async def send(self, request: BenchRequest, reply: Reply) -> None:
        """Sends the request and reads the whole reply; raises `TargetFault` on failure.

        Cancellation cancels the request on the server.
        """

    async def close(self) -> None: ...
