"""The script of a fake server, and its request log."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from outrider.errors import ConfigError

FIRST_TOKEN_ID = 1000
PROMPT_CHARS = 120  # logged of each prompt
DRIP_BYTES = 16
DRIP_S = 0.002


class Fault(StrEnum):
    """A fault injected into a request."""

    TOO_MANY = "429"
    INTERNAL = "500"
    UNAVAILABLE = "503"
    HANG_UP = "hang up"  # closes the connection without a response
    RESET = "reset"  # resets the connection mid-stream
    CUT_OFF = "cut off"  # ends the stream cleanly, halfway through
    MALFORMED = "malformed"  # an event that is not JSON, or an invalid message
    SILENCE = "silence"  # half an event, then nothing
    DRIP = "drip"  # the whole response, a few bytes at a time
    STREAM_ERROR = "stream error"  # an error in place of the next update


class Jitter(StrEnum):
    """Distribution of delays, of width `Script.spread`; it keeps their mean."""

    NONE = "none"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class Script:
    """The response to every request."""

    ttft_s: float = 0.0
    gap_s: float = 0.0  # between updates; updates due together are written together
    updates: int | None = 8  # None: as many as the request's max_tokens needs
    tokens_per_update: int = 1
    jitter: Jitter = Jitter.NONE
    spread: float = 0.0  # half the width of uniform, or sigma of lognormal; relative to the delay
    # (from, for), in seconds after the first request: all responses stall. Requests in flight
    # resume afterwards; requests that arrive meanwhile start then.
    stall: tuple[float, float] | None = None
    faults: Mapping[Fault, float] = field(default_factory=dict)  # share of the requests
    retry_after_s: float | None = None  # sent with 429 and 503
    has_usage: bool = True  # sent if requested
    has_ids: bool = False
    word: str = " word"  # each token as text
    model: str = "fake"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ttft_s < 0 or self.gap_s < 0 or self.tokens_per_update < 1:
            raise ConfigError(
                f"the script has ttft_s {self.ttft_s}, gap_s {self.gap_s} and tokens_per_update "
                f"{self.tokens_per_update}; give times of at least 0 and at least one token."
            )
        if sum(self.faults.values()) > 1 + 1e-9 or any(v < 0 for v in self.faults.values()):
            raise ConfigError(
                f"the shares of faults are {dict(self.faults)}; give at most 1 in all."
            )

    def num_updates(self, max_tokens: int) -> int:
        if self.updates is not None:
            return self.updates
        return -(-max_tokens // self.tokens_per_update)

    def token_ids(self, update: int) -> list[int]:
        first = FIRST_TOKEN_ID + update * self.tokens_per_update
        return list(range(first, first + self.tokens_per_update))


@dataclass(slots=True)
class ServedRequest:
    """One request as the server saw it. Times are `time.monotonic()`, which all processes of a
    machine share."""

    number: int  # in order of arrival
    prompt: str  # the start of its text or of its last message
    received_s: float
    fault: Fault | None = None
    first_s: float | None = None  # when its first update was written
    last_s: float | None = None  # when its last update was written
    updates: int = 0
    is_closed_early: bool = False  # the client disconnected before the end

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.received_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.received_s


class ScriptPlayer:
    """Executes the script: draws each request's delays and faults, and logs it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.served: list[ServedRequest] = []
        self._stall_from_s = self._stall_to_s = 0.0
        self._random = random.Random(script.seed)
        self._is_plain = script.jitter is Jitter.NONE

    @property
    def faults(self) -> Counter[Fault]:
        return Counter(each.fault for each in self.served if each.fault is not None)

    def begin(self, prompt: str, now_s: float) -> ServedRequest:
        if not self.served and self.script.stall is not None:
            self._stall_from_s = now_s + self.script.stall[0]
            self._stall_to_s = self._stall_from_s + self.script.stall[1]
        served = ServedRequest(len(self.served), prompt[:PROMPT_CHARS], now_s, self._fault())
        self.served.append(served)
        return served

    def delays(self, num_updates: int) -> list[float]:
        """Seconds from the request to each update, ascending."""
        script = self.script
        if self._is_plain:
            return [script.ttft_s + script.gap_s * number for number in range(num_updates)]
        due, delays = 0.0, []
        for number in range(num_updates):
            due += self._scattered(script.gap_s if number else script.ttft_s)
            delays.append(due)
        return delays

    def stall_delay_s(self, start_s: float, now_s: float) -> float:
        """Delay that the stall adds to work started at `start_s` and due now."""
        if self.script.stall is None or now_s < self._stall_from_s or start_s >= self._stall_to_s:
            return 0.0
        return self._stall_to_s - max(start_s, self._stall_from_s)

    def write(self, path: Path) -> None:
        """Writes the request log, one line per request."""
        rows: Iterable[str] = (json.dumps(dataclasses.asdict(each)) for each in self.served)
        path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")

    def _fault(self) -> Fault | None:
        if not self.script.faults:
            return None
        drawn = self._random.random()
        for fault, share in self.script.faults.items():
            drawn -= share
            if drawn < 0:
                return fault
        return None

    def _scattered(self, delay_s: float) -> float:
        spread = self.script.spread
        match self.script.jitter:
            case Jitter.UNIFORM:
                return delay_s * max(self._random.uniform(1 - spread, 1 + spread), 0.0)
            case Jitter.LOGNORMAL:
                return delay_s * self._random.lognormvariate(-spread * spread / 2, spread)
            case Jitter.EXPONENTIAL:
                return delay_s * self._random.expovariate(1.0)
        return delay_s
