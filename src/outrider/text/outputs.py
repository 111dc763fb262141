"""Outputs of requests: text, tokens, log-probabilities and speculation statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.errors import ModelError
from outrider.scheduler.types import FinishReason


class Logprob(NamedTuple):
    """Log-probability of one token under the target's own distribution; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = Mapping[int, Logprob]


class Round(NamedTuple):
    """The tokens of one pass of the target: accepted draft tokens, then one of its own.

    That one is the bonus token if all were accepted, else the recovered token. It is missing if the
    text ended before it.
    """

    num_tokens: int
    num_accepted: int  # the first ones
    num_verified: int  # draft tokens verified


@dataclass(slots=True)
class Speculation:
    """Speculation statistics of a text. Every round commits its accepted draft tokens and one token
    of the target's own; `drafted_by_token[i]` says which token i is."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_token: list[bool] = field(default_factory=list)
    # By position in the round: how often a draft token was verified, and accepted.
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def take(self, num_drafted: int, done: Round) -> None:
        """Add one round."""
        self.rounds += 1
        self.drafted += num_drafted
        self.accepted += done.num_accepted
        missing = done.num_verified - len(self.verified_at)
        if missing > 0:
            self.verified_at += [0] * missing
            self.accepted_at += [0] * missing
        for position in range(done.num_verified):
            self.verified_at[position] += 1
        for position in range(done.num_accepted):
            self.accepted_at[position] += 1

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
    pieces: list[str] = field(default_factory=list)  # of the text, in order
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string, if one ended it
    speculation: Speculation = field(default_factory=Speculation)

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, "
            f"token_ids={self.token_ids}, finish_reason={self.finish_reason!r}, "
            f"stop_reason={self.stop_reason!r})"
        )

    @property
    def text(self) -> str:
        """Joined on access: a long text is not copied for every new token."""
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

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
    queued_s: float = 0.0  # until its first step

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs, complete or partial."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: ModelError | None = None  # why a text ended with `FinishReason.ERROR`

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    @property
    def num_generated(self) -> int:
        """Tokens so far, of all outputs."""
        return sum(len(output.token_ids) for output in self.outputs)

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error


def no_token_error(model: str) -> ModelError:
    """The error of a request that ended with `FinishReason.ERROR`."""
    return ModelError(
        f"the model {model!r} computed logits that are NaN or infinite, so no token can be chosen; "
        "check its weights, or give it another dtype if they are sound."
    )


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one or more steps added to one text; the last delta has the finish reason."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]  # of token_ids, in order
    finish_reason: FinishReason | None
    output: RequestOutput  # everything so far

    @property
    def is_drafted(self) -> list[bool]:
        """For each of `token_ids`."""
        return [
            position < each.num_accepted
            for each in self.rounds
            for position in range(each.num_tokens)
        ]


def joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deltas of one text, merged."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return OutputDelta(
        last.request_id,
        last.index,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(done for delta in deltas for done in delta.rounds),
        last.finish_reason,
        last.output,
    )
