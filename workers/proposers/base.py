"""The base of all proposers, and the set of them that an engine runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.scheduler.costs import CostTable, StepCosts
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

MAX_REPLAYED_TOKENS = 32
"""The last output tokens of a row in a catch-up pass whose acceptance is replayed."""

NO_COST = CostTable((1,), (0.0,))
"""The cost of drafting without a model: negligible."""


class Proposer(ABC):
    """Drafts tokens for the target to verify, from the host's texts. Every proposer implements
    `follow`, `propose` and `observe`; the rest has defaults for those without such a part."""

    computed: dict[int, int]
    """By row: valid positions of its KV in the draft pool. Only a proposer with a `kv_rule` has it;
    its passes on the device share it."""

    @abstractmethod
    def follow(self, plan: StepPlan) -> None:
        """Called first, for every plan: apply its row changes."""

    @abstractmethod
    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        """Proposals by row, for this proposer's rows of the plan or some of them."""

    @abstractmethod
    def observe(self, verdict: Verdict) -> None:
        """Learn the outcome of a round."""

    def note(self, plan: StepPlan, verdict: Verdict) -> None:
        """Learn the outcome of a step that ran on the device; the row table has it already."""

    def take_agreements(self) -> tuple[Agreement, ...]:
        """Replayed acceptance since the last call: what it would have guessed while it did not
        draft, compared with the text."""
        return ()

    def measure_costs(self, target: Runner) -> StepCosts | None:
        """Time the parts of a step in which it drafts; None if it runs no model."""
        return None


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """The configuration of proposers."""

    ngram_min: int
    ngram_max: int


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """The inputs to build a proposer. `draft` is set if there is a draft model, `head` if the
    target has a head."""

    rows: RowTable
    settings: ProposerSettings
    ops: Ops
    verification: VerificationMode
    draft: Runner | None = None
    head: HeadRunner | None = None


class Proposers:
    """The proposers of one process, by name; every row of a plan names its proposer."""

    def __init__(self, proposers: Mapping[str, Proposer], with_kv: str | None = None) -> None:
        """`with_kv` names the proposer whose KV is in the draft pool."""
        self._proposers = proposers
        self._with_kv = with_kv

    def __contains__(self, name: str) -> bool:
        return name in self._proposers

    def of(self, name: str) -> Proposer | None:
        return self._proposers.get(name)

    @property
    def computed(self) -> dict[int, int]:
        """By row: valid positions of the KV in the draft pool."""
        return {} if self._with_kv is None else self._proposers[self._with_kv].computed

    def measure_costs(self, target: Runner) -> StepCosts | None:
        """Time the parts of a step; None if no proposer runs a model."""
        found = (each.measure_costs(target) for each in self._proposers.values())
        return next((costs for costs in found if costs is not None), None)

    def events(self) -> Sequence[DraftEvent]:
        """Always empty: an in-process draft is never lost."""
        return ()

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        raise AssertionError("an in-process draft never joins")

    def follow(self, plan: StepPlan) -> None:
        for proposer in self._proposers.values():
            proposer.follow(plan)

    def propose(self, plan: StepPlan) -> Ticket:
        """Proposers without rows in the plan only follow it. Catch-up deferred from the last plan
        runs now."""
        start_s = time.perf_counter()
        active = {row.proposer for row in plan.rows if row.depth and row.proposer in self}
        if self._with_kv is not None and any(row.draft_tokens for row in plan.rows):
            active.add(self._with_kv)
        self.follow(plan)
        agreements = tuple(
            found for each in self._proposers.values() for found in each.take_agreements()
        )
        proposals: dict[int, Proposal] = {}
        for name in sorted(active):
            proposals |= self._proposers[name].propose(plan)
        draft_s = time.perf_counter() - start_s
        return Ticket(plan.step, proposals, draft_s, agreements=agreements)

    def observe(self, verdict: Verdict) -> None:
        for proposer in self._proposers.values():
            proposer.observe(verdict)

    def note(self, plan: StepPlan, verdict: Verdict) -> None:
        for proposer in self._proposers.values():
            proposer.note(plan, verdict)
