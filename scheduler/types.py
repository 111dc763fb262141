"""Everything that crosses between the scheduler, its callers and the workers, and who owns it.

A `RequestSpec` describes a request. It is made once and never changed; a `SampleId` identifies one
of its samples.

One step: a `StepPlan` goes to the proposers, which return a `Ticket`; both go to the target, and
its `Outcome` becomes a `Verdict`. The ticket has a `Proposal` per row or, if the draft is another
process, the link over which it sends them. `DraftEvent`s report a lost or new draft.

The scheduler owns blocks, rows and what has been *applied*. The target owns the committed text:
only a verdict makes a token true. A proposer only guesses. Up to two plans may be in flight, so a
plan holds upper bounds and counts, never token values or absolute positions; the workers know the
true lengths and advance them with every verdict.

Rows are reused, so everything carries (epoch, row, generation); a receiver drops what is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from operator import add
from typing import Any, NamedTuple, Protocol

from outrider.compat_fields import added_field
from outrider.scheduler.params import SamplingParams

NO_TOKEN = -1
"""Stands for a token that cannot be chosen: its logits are all NaN or infinite."""
NO_PROPOSER = ""
"""The proposer of a row without drafts; such rows run no speculative code at all."""


class SampleId(NamedTuple):
    """Identifies a sample of a request; unique over the engine's life."""

    link: int  # the connection it came over; `IN_PROCESS` without one
    handle: int  # chosen by the other end


IN_PROCESS = 0

# Upper bounds of the histogram of tokens per step, as in vLLM.
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


class Exclusive(IntEnum):
    """When a request needs exclusive steps; the workers decide."""

    NEVER = 0
    PROMPT = 1  # until its prompt is computed
    ALWAYS = 2


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A validated request with every default filled in."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # of the request, 64 bits; a sample's seed derives from it and the sample's index
    max_len: int  # of prompt plus output
    stop_ids: tuple[int, ...] = ()  # these end the request
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    proposer: str = NO_PROPOSER
    depth: int = 0
    is_depth_fixed: bool = False  # `depth` is exact whatever the policy says, not a maximum
    priority: int = 0  # lower runs sooner
    cache_salt: str = added_field("")  # opaque: prompts share cached KV only under equal salts
    tenant: str = added_field("")  # opaque: tenants share service fairly


@dataclass(frozen=True, slots=True)
class RowInit:
    """A request takes a row on the workers.

    `token_ids` are prompt plus output so far (a resumed or preempted request has output already;
    it is prefilled but stays output). `*_cached` tokens already have KV in the blocks of the first
    `RowPlan` of this row. `stop_ids` end the request; the sampler bans them before `min_tokens`.
    Only `proposer` drafts for it in this row.
    """

    row: int
    generation: int
    sample_id: SampleId
    token_ids: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    seed: int  # effective 64-bit seed of this sample
    stop_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    target_cached: int = 0
    draft_cached: int = 0
    proposer: str = NO_PROPOSER


class RowPlan(NamedTuple):
    """One row's share of one pass. A NamedTuple: a step may hold a thousand of them.

    A prompt row has `num_tokens` known tokens to process; it samples only if `samples`. A decode
    row has `num_tokens == 1` (its last committed token) plus its drafts: its proposal has at most
    `depth` tokens, of which at most `num_verified` are verified.
    Block lists extend the row's table from index `*_start` on (lookahead blocks returned after a
    rejection are overwritten, hence the index).
    """

    row: int
    generation: int
    num_tokens: int
    depth: int
    num_verified: int
    samples: bool
    proposer: str  # its name in the registry; `NO_PROPOSER` if depth is 0
    target_start: int
    target_blocks: tuple[int, ...]
    draft_start: int
    draft_blocks: tuple[int, ...]
    draft_tokens: int  # at most this many known tokens are prefilled or caught up on by the draft

    @property
    def pass_tokens(self) -> int:
        """The row's tokens in the target's pass."""
        return self.num_tokens + self.num_verified


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One target pass over the batch, and the drafting before it."""

    epoch: int
    step: int
    rows: tuple[RowPlan, ...]
    admitted: tuple[RowInit, ...] = ()
    released: tuple[int, ...] = ()  # rows whose state the workers may forget
    draft_released: tuple[int, ...] = ()  # rows that continue, but whose draft KV is void
    num_selected: int | None = None
    """Verify only this many drafts in all: the likeliest, each with all before it in its row. None:
    every row's `num_verified`."""
    least_survival: float = 0.0
    """A row's drafting ends with the first draft whose estimated acceptance probability, with all
    before it, is below this."""
    num_branches: int = added_field(0)
    """While the pass before runs, a draft in a rank of its own may draft for this plan, after so
    many of that pass's possible outcomes."""

    @property
    def uses_draft(self) -> bool:
        """Whether the draft model has to compute anything for it."""
        return any(row.draft_tokens for row in self.rows)

    @property
    def catches_up(self) -> bool:
        """Whether the draft model computes known text of rows that it does not draft for."""
        return any(row.draft_tokens and not row.depth for row in self.rows)

    @property
    def has_round(self) -> bool:
        """Whether the draft model drafts for any of its rows."""
        return any(row.depth and row.draft_tokens for row in self.rows)


class Proposal(NamedTuple):
    """Drafted tokens of one row, at most as many as planned.

    The target owns the text: a proposal whose generation or `base_len` is no longer that of the
    row is dropped. `q` are the distributions the tokens were sampled from, a tensor
    [len(tokens), vocab]; None means the proposer was deterministic (or sampled with the shared
    noise, which needs none).
    """

    generation: int
    base_len: int
    tokens: Sequence[int]
    confidences: Sequence[float]
    q: Any = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """The proposals for one step: by row, or the number of the link over which a draft in another
    process sends them to the target."""

    step: int
    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    draft_s: float = 0.0
    link: int = 0  # 0: none
    agreements: tuple[Agreement, ...] = ()  # since the last ticket

    def drafts_for(self, row: int, generation: int, base_len: int) -> Proposal | None:
        found = self.proposals.get(row)
        if found is None or (found.generation, found.base_len) != (generation, base_len):
            return None
        return found


class TokenLogprobs(NamedTuple):
    """Log-probabilities (of the raw model distribution) at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...]  # the most likely (id, logprob), best first


class RowVerdict(NamedTuple):
    """What the target commits for one row: accepted drafts, then one token of its own.

    `base_len` is the committed length before. `tokens` is empty for a prompt chunk that does not
    sample. `num_drafted` is the proposal's length, `num_verified` how many of its tokens the target
    verified: either may be less than planned, as a proposer may offer less.
    """

    row: int
    generation: int
    base_len: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens this chunk predicts
    is_broken: bool = (
        False  # no token could be chosen: the last is `NO_TOKEN`, and the request ends
    )


class Agreement(NamedTuple):
    """Whether a draft would have proposed the output it has caught up on: under shared noise a text
    does not depend on its drafts, so this is the acceptance drafting would have had. Prompt tokens
    are not counted, nor rows without shared noise."""

    row: int
    generation: int
    hits: tuple[bool, ...]  # token by token, in the order of the text


class AheadCounts(NamedTuple):
    """What drafting ahead of outcomes came to."""

    rounds: int = 0  # of a row, drafted ahead of
    hits: int = 0  # of these, with the outcome among the branches
    drafted: int = 0  # tokens, in all branches
    used: int = 0  # of these, proposed

    def plus(self, other: AheadCounts) -> AheadCounts:
        return AheadCounts(*map(add, self, other))


NONE_AHEAD = AheadCounts()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one step, rows in the order of the plan."""

    epoch: int
    step: int
    rows: tuple[RowVerdict, ...]
    draft_s: float = 0.0  # drafting and catching up, wherever in the step
    verify_s: float = 0.0
    agreements: tuple[Agreement, ...] = ()  # of rows that caught up in this step or before it

    def wait(self) -> Verdict:
        return self


class Outcome(Protocol):
    """A verdict, or the future of one that a device is still computing."""

    def wait(self) -> Verdict: ...


class PendingVerdict:
    """The outcome of a step in flight; `read` waits for it, and is called once."""

    __slots__ = ("_read", "_verdict")

    def __init__(self, read: Callable[[], Verdict]) -> None:
        self._read: Callable[[], Verdict] | None = read
        self._verdict: Verdict | None = None

    @property
    def is_known(self) -> bool:
        return self._verdict is not None

    def wait(self) -> Verdict:
        if self._read is not None:
            self._verdict = self._read()
            self._read = None  # frees the buffer it holds
        assert self._verdict is not None
        return self._verdict


class DraftEvent(StrEnum):
    """A change of the draft model, reported by its workers and applied by the loop."""

    LOST = "lost"  # with its KV
    JOINED = "joined"  # with an empty cache: it needs the current rows


class FinishReason(StrEnum):
    """Why a request ended; the strings are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(slots=True)
class RequestUpdate:
    """What one `apply` (or a cancellation) changed for one sample."""

    sample_id: SampleId
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0  # this many of the first token_ids were drafted
    num_drafted: int = 0
    num_verified: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = field(default=0)
    queued_s: float = 0.0  # time it waited for a row
