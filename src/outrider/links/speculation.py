"""An engine's speculation for operators: settings, status and past steps."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEP_ACCOUNTS = 256  # in one answer


@dataclass(frozen=True, slots=True)
class SpeculationChange:
    """A change by an operator; the rest stays."""

    policy: str | None = None  # None: unchanged
    sets_max_depth: bool = False  # else `max_depth` is ignored
    max_depth: int | None = None  # None: each request's own limit

    def followed_by(self, later: SpeculationChange) -> SpeculationChange:
        """Both changes combined."""
        return SpeculationChange(
            self.policy if later.policy is None else later.policy,
            self.sets_max_depth or later.sets_max_depth,
            later.max_depth if later.sets_max_depth else self.max_depth,
        )


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """The policy and bound in force, and those the engine started with."""

    policy: str
    max_depth: int | None  # of any request; None: its own limit
    first_policy: str
    first_max_depth: int | None
    depth: int  # the maximum depth of requests that set none
    is_weighed: bool  # the costs of drafting and verifying were measured


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """The state of speculation; averages are over the last steps."""

    settings: SpeculationSettings
    mean_depth: float  # of drafting rows
    drafting_share: float  # of decode rows
    acceptance: float | None  # of verified draft tokens; None: none yet
    agreement: float | None  # measured while the draft only catches up; None: not yet
    gain: float | None  # estimated, over plain decoding; None: costs unknown
    draft_cost: float | None  # of one draft token, in target passes; None: unknown
    arrivals_per_s: float
    calibration_error: float | None  # of predicted tokens/s; None: no prediction yet
    steps_without: int  # steps since a row last drafted
    warning: str  # with its remedy; empty while speculation pays off


@dataclass(frozen=True, slots=True)
class CandidateAccount:
    """A candidate choice of depths in a step, with its prediction."""

    level: int  # the largest depth of any row
    num_drafts: int
    num_verified: int
    tokens: float  # expected to be committed
    draft_s: float
    verify_s: float

    @property
    def tokens_per_s(self) -> float:
        seconds = self.draft_s + self.verify_s
        return self.tokens / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class StepAccount:
    """One step: its state, the candidates, the choice and the result."""

    step: int
    policy: str
    num_rows: int  # that decode
    num_waiting: int
    num_prompt_tokens: int
    num_drafting: int  # rows chosen to draft
    num_drafts: int  # draft tokens planned
    num_caught_up: int  # tokens the draft computed to catch up
    candidates: tuple[CandidateAccount, ...]  # plain decoding first, then the best ones
    chosen: CandidateAccount | None  # None: there was no choice
    reason: str  # of the choice, as a sentence
    committed: int | None  # None until the verdict
    draft_s: float
    verify_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Measured; None until the verdict."""
        seconds = self.draft_s + self.verify_s
        return self.committed / seconds if self.committed is not None and seconds > 0 else None
