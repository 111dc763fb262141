"""What a caller gets back: text, tokens, log-probabilities, and what speculation did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.scheduler.types import FinishReason


class Logprob(NamedTuple):
    """Log-probability of one token under the target's own distribution; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = Mapping[int, Logprob]


@dataclass(slots=True)
class Speculation:
    """How a text came about. Every round commits its accepted drafts and one token of the
    target's own; `drafted_by_token[i]` tells which of the two token i is."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_token: list[bool] = field(default_factory=list)

    @property
    def block_efficiency(self) -> float:
        """Tokens committed per round; 1.0 is plain decoding."""
        return len(self.drafted_by_token) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One generated text."""

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string, if one ended it
    speculation: Speculation = field(default_factory=Speculation)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """A request and its texts, complete or so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to one text; the last one of a text has its finish reason."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    num_accepted: int  # the first so many of token_ids were drafted
    finish_reason: FinishReason | None
    output: RequestOutput  # everything so far
