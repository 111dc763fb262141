"""What an engine tells of its speculation: settings, how it fares, and steps it has taken."""

from __future__ import annotations

from dataclasses import dataclass

MOST_STEPS = 256  # an account may hold


@dataclass(frozen=True, slots=True)
class SpeculationChange:
    """What an operator wants changed; the rest stays."""

    policy: str | None = None  # None: as it is
    sets_max_depth: bool = False  # else `max_depth` says nothing
    max_depth: int | None = None  # None: each request's own limit

    def followed_by(self, later: SpeculationChange) -> SpeculationChange:
        """Both as one."""
        return SpeculationChange(
            self.policy if later.policy is None else later.policy,
            self.sets_max_depth or later.sets_max_depth,
            later.max_depth if later.sets_max_depth else self.max_depth,
        )


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Who decides how far is drafted, within which bounds; and what the engine began with."""

    policy: str
    max_depth: int | None  # of any request; None: its own limit
    first_policy: str
    first_max_depth: int | None
    depth: int  # drafts a request asks for unless it says otherwise
    is_weighed: bool  # the costs of drafting and verifying were measured, so they can be weighed


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """How speculation fares; averages are over the last steps."""

    settings: SpeculationSettings
    mean_depth: float  # of rows that draft
    drafting_share: float  # of decode rows
    acceptance: float | None  # of drafts verified; None: none were yet
    agreement: float | None  # of drafts with text they only caught up on; None: not asked yet
    gain: float | None  # over plain decoding, as estimated; None: costs are not known
    draft_cost: float | None  # of drafting one token, in passes of the target; None: not known
    arrivals_per_s: float
    calibration_error: float | None  # of predicted tokens/s; None: nothing was predicted yet
    steps_without: int  # steps since anybody drafted
    warning: str  # with its remedy; empty while speculation pays


@dataclass(frozen=True, slots=True)
class CandidateAccount:
    """One way to draft in a step, as it was predicted."""

    level: int  # the deepest draft of any row
    num_drafts: int
    num_verified: int
    tokens: float  # to be committed
    draft_s: float
    verify_s: float

    @property
    def tokens_per_s(self) -> float:
        seconds = self.draft_s + self.verify_s
        return self.tokens / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class StepAccount:
    """One step: what was known, what was weighed, what was chosen and what came of it."""

    step: int
    policy: str
    num_rows: int  # that decode
    num_waiting: int
    num_prompt_tokens: int
    num_drafting: int  # rows that were chosen to draft
    num_drafts: int  # planned in the end
    num_caught_up: int  # tokens the draft computed to be up to date
    candidates: tuple[CandidateAccount, ...]  # plain decoding first, then the best found
    chosen: CandidateAccount | None  # None: nothing was weighed
    reason: str  # the choice as a sentence
    committed: int | None  # None until the verdict is there
    draft_s: float
    verify_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """As it came to be; None until the verdict is there."""
        seconds = self.draft_s + self.verify_s
        return self.committed / seconds if self.committed is not None and seconds > 0 else None
