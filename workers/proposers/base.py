"""Who drafts: the protocol every proposer follows, and the set an engine runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from outrider.scheduler.costs import CostTable
from outrider.scheduler.types import (
    Agreement,
    DraftEvent,
    Proposal,
    RowInit,
    StepPlan,
    Ticket,
    Verdict,
)

if TYPE_CHECKING:  # the registry, which names all proposers, needs no tensors
    from outrider.kernels.ops import Ops
    from outrider.workers.heads.runner import HeadRunner
    from outrider.workers.rows import RowTable
    from outrider.workers.runner import Runner
    from outrider.workers.sampling.verify import VerificationMode

# Names of those that come with Outrider.
DRAFT = "draft"
NGRAM = "ngram"

MOST_GUESSED = 32
"""Output tokens of a row in a pass of catching up that a draft says something of: the last ones."""

NO_COST = CostTable((1,), (0.0,))
"""Of drafting without a model: too little to count."""


class Proposer(Protocol):
    """Guesses what the target will say next."""

    def follow(self, plan: StepPlan) -> None:
        """Every plan, first of all: take note of rows that come and go."""
        ...

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        """Proposals by row for the rows of the plan that are this proposer's; may be fewer."""
        ...

    def observe(self, verdict: Verdict) -> None:
        """Learn what became of a round."""
        ...


@runtime_checkable
class ForeseeingProposer(Protocol):
    """One that can say what it would have guessed while it did not draft."""

    def take_agreements(self) -> tuple[Agreement, ...]:
        """What it found since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """What proposers can be told by the configuration."""

    ngram_min: int
    ngram_max: int


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer may be built from. `draft` is there where a draft model is, `head` beside the
    target where there is one."""

    rows: RowTable
    settings: ProposerSettings
    ops: Ops
    verification: VerificationMode
    draft: Runner | None = None
    head: HeadRunner | None = None


class Proposers:
    """The proposers of one process, by name; every row of a plan names its own."""

    def __init__(self, proposers: Mapping[str, Proposer], with_kv: str | None = None) -> None:
        """`with_kv` names the one whose KV is in the draft pool."""
        self._proposers = proposers
        self._with_kv = with_kv
        self._foreseeing = [p for p in proposers.values() if isinstance(p, ForeseeingProposer)]

    def __contains__(self, name: str) -> bool:
        return name in self._proposers

    def of(self, name: str) -> Proposer | None:
        return self._proposers.get(name)

    def events(self) -> Sequence[DraftEvent]:
        """Proposers of this process live as long as it does."""
        return ()

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        raise AssertionError("nobody joined")

    def needs_verdicts(self, plan: StepPlan) -> bool:
        """They read the texts, which end with the last verdict."""
        return True

    def follow(self, plan: StepPlan) -> None:
        for proposer in self._proposers.values():
            proposer.follow(plan)

    def propose(self, plan: StepPlan) -> Ticket:
        """Those that have nothing to do for a plan only follow it; what they put off for the plan
        before is done now."""
        start_s = time.perf_counter()
        wanted = {row.proposer for row in plan.rows if row.depth and row.proposer in self}
        if self._with_kv is not None and any(row.draft_tokens for row in plan.rows):
            wanted.add(self._with_kv)
        self.follow(plan)
        agreements = tuple(found for each in self._foreseeing for found in each.take_agreements())
        proposals: dict[int, Proposal] = {}
        for name in sorted(wanted):
            proposals |= self._proposers[name].propose(plan)
        draft_s = time.perf_counter() - start_s
        return Ticket(plan.step, proposals, draft_s, agreements=agreements)

    def observe(self, verdict: Verdict) -> None:
        for proposer in self._proposers.values():
            proposer.observe(verdict)
