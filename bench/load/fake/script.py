"""What a fake server does, and what it has done."""

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
PROMPT_CHARS = 120  # kept of each
DRIP_BYTES = 16
DRIP_S = 0.002


class Fault(StrEnum):
    """What may happen to a request instead of its answer."""

    TOO_MANY = "429"
    INTERNAL = "500"
    UNAVAILABLE = "503"
    HANG_UP = "hang up"  # the connection is closed without an answer
    RESET = "reset"  # in the middle of the answer
    CUT_OFF = "cut off"  # the answer ends properly, in its middle
    MALFORMED = "malformed"  # an event that is no JSON, or a message that is no message
    SILENCE = "silence"  # half an event, then nothing, ever
    DRIP = "drip"  # the whole answer, a few bytes at a time
    STREAM_ERROR = "stream error"  # an error where the next update belongs


class Jitter(StrEnum):
    """How delays scatter; `Script.spread` says how far, their mean stays."""

    NONE = "none"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class Script:
    """What every request is answered with."""

    ttft_s: float = 0.0
    gap_s: float = 0.0  # between updates; those that are due together are written together
    updates: int | None = 8  # None: as many as the request's max_tokens needs
    tokens_per_update: int = 1
    jitter: Jitter = Jitter.NONE
    spread: float = 0.0  # half the width of uniform, or sigma of lognormal; relative to the delay
    # (from, for): so long after the first request, nothing is answered for so long. What was
    # under way goes on afterwards, what came meanwhile begins then.
    stall: tuple[float, float] | None = None
    faults: Mapping[Fault, float] = field(default_factory=dict)  # their shares of the requests
    retry_after_s: float | None = None  # told with 429 and 503
    has_usage: bool = True  # if asked for, as servers do
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
class Served:
    """One request as the server saw it; times are `time.monotonic()`, the clock of all processes
    of a machine."""

    number: int  # in order of arrival
    prompt: str  # how its text begins, or that of the last message
    received_s: float
    fault: Fault | None = None
    first_s: float | None = None  # when its first update was written
    last_s: float | None = None  # likewise the last one
    updates: int = 0
    is_closed_early: bool = False  # the client left before the end

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.received_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.received_s


class Actor:
    """Plays the script: draws what happens to each request, and keeps the books."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.served: list[Served] = []
        self._stall_from_s = self._stall_to_s = 0.0
        self._random = random.Random(script.seed)
        self._is_plain = script.jitter is Jitter.NONE

    @property
    def faults(self) -> Counter[Fault]:
        return Counter(each.fault for each in self.served if each.fault is not None)

    def begin(self, prompt: str, now_s: float) -> Served:
        if not self.served and self.script.stall is not None:
            self._stall_from_s = now_s + self.script.stall[0]
            self._stall_to_s = self._stall_from_s + self.script.stall[1]
        served = Served(len(self.served), prompt[:PROMPT_CHARS], now_s, self._fault())
        self.served.append(served)
        return served

    def delays(self, num_updates: int) -> list[float]:
        """From the request to each update, in seconds, rising."""
        script = self.script
        if self._is_plain:
            return [script.ttft_s + script.gap_s * number for number in range(num_updates)]
        due, delays = 0.0, []
        for number in range(num_updates):
            due += self._scattered(script.gap_s if number else script.ttft_s)
            delays.append(due)
        return delays

    def held_up_s(self, start_s: float, now_s: float) -> float:
        """How much later the stall makes what began at `start_s` and would be done now."""
        if self.script.stall is None or now_s < self._stall_from_s or start_s >= self._stall_to_s:
            return 0.0
        return self._stall_to_s - max(start_s, self._stall_from_s)

    def write(self, path: Path) -> None:
        """The books, a line for each request."""
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
