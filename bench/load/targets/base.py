"""What a client needs of a server, whatever it speaks."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from outrider.bench.load.asks import Ask
from outrider.bench.load.plain import plain
from outrider.bench.load.records import CountedBy, Speculated
from outrider.errors import ConfigError

MAX_CHANNELS = 1024
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class TargetFault(Exception):
    """A request failed: `kind` groups failures in few words, the message is what was said, made
    fit to print."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(plain(message))
        self.kind = kind


@dataclass(slots=True)
class Reply:
    """Filled in while an answer arrives, so that what came before a failure is kept."""

    sent_s: float = 0.0
    update_s: list[float] = field(default_factory=list)
    update_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = CountedBy.NOBODY
    finish: str | None = None
    retries: int = 0
    speculated: Speculated | None = None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def sending(self) -> None:
        """The request leaves now."""
        self.sent_s = time.monotonic()

    def update(self, num_tokens: int | None) -> None:
        """Tokens have arrived now; None: some, and only their sum will be told."""
        self.update_s.append(time.monotonic() - self.sent_s)
        if num_tokens is not None:
            self.update_tokens.append(num_tokens)
            self.output_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Where and how an arm sends its requests; travels to the client processes.

    `extras` go into every request of this arm as they are: fields of the HTTP body, or parameters
    of `SamplingParams` (`speculation`, `num_speculative_tokens`, ...) over gRPC and in process.
    What could be read as more than one header, or would be shown though it is secret, is refused
    without being repeated.
    """

    url: str  # grpc://host:port, http(s)://host:port[/v1], or inprocess:
    model: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False  # do not check the certificate
    tokenizer: str | None = None  # to count tokens by where a server tells no number
    keeps_text: bool = False
    retries: int = 0  # of requests refused with 429 or 503; counted
    channels: int = 8  # connections of gRPC; HTTP opens what it needs

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not isinstance(name, str) or _HEADER_NAME.fullmatch(name) is None:
                raise ConfigError(f"{name!r} is no name of a header; use letters, digits and '-'.")
            if not isinstance(value, str) or not _is_one_line(value):
                raise ConfigError(
                    f"the header {name} must be text on one line, of ASCII characters; write it so."
                )
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
        """The same at an address that is known by now."""
        return dataclasses.replace(self, url=url)


def _is_one_line(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _has_user(url: str) -> bool:
    try:
        return "@" in urlsplit(url).netloc
    except ValueError:  # who makes the target says what is wrong with it
        return False


class Target(Protocol):
    """A server as one client process sees it. All methods run on that process's event loop."""

    # Stays open from shift to shift: an engine that would have to load its weights again.
    outlives_shifts: bool

    async def open(self) -> None:
        """Connect; raise `TargetFault` if nobody answers within a few seconds."""

    async def send(self, ask: Ask, reply: Reply) -> None:
        """Send and read to the end, keeping `reply`; raise `TargetFault` if it fails.

        Cancelling it gives the request up and tells the server so.
        """

    async def close(self) -> None: ...
