"""Who drafts: the protocol every proposer follows, and the set an engine runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.scheduler.types import Outcome, ProposerKind, StepPlan, Verdict

if TYPE_CHECKING:  # an engine whose models are elsewhere has tickets but no tensors
    from torch import Tensor


class Proposal(NamedTuple):
    """Drafted tokens of one row, at most as many as planned.

    The target owns the text: a proposal whose generation or `base_len` is no longer that of the
    row is dropped. `q` are the distributions the tokens were sampled from, [len(tokens), vocab];
    None means the proposer was certain (or sampled with the shared noise, which needs none).
    """

    generation: int
    base_len: int
    tokens: Sequence[int]
    confidences: Sequence[float]
    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """One round of proposals, by row; or, where they are made elsewhere, the `round` in which they
    were announced, and the target comes by them itself."""

    step: int
    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    draft_s: float = 0.0
    round: int | None = None

    def drafts_for(self, row: int, generation: int, base_len: int) -> Proposal | None:
        found = self.proposals.get(row)
        if found is None or (found.generation, found.base_len) != (generation, base_len):
            return None
        return found


class Proposer(Protocol):
    """Guesses what the target will say next."""

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        """Proposals by row for the rows of the plan that are this proposer's; may be fewer."""
        ...

    def observe(self, verdict: Verdict) -> None:
        """Learn what became of the last round."""
        ...


class Proposers:
    """The proposers of one engine; every row of a plan names its own."""

    def __init__(self, proposers: Mapping[ProposerKind, Proposer]) -> None:
        self._proposers = proposers

    def sync(self, scheduler: object) -> None:
        """Proposers of this process live as long as it does."""

    def propose(self, plan: StepPlan) -> Ticket:
        """A plan without depth or draft work runs nothing here."""
        wanted = {row.proposer for row in plan.rows if row.depth}
        if any(row.draft_tokens for row in plan.rows):
            wanted.add(ProposerKind.DRAFT)
        if not wanted:
            return Ticket(plan.step)
        start_s = time.perf_counter()
        proposals: dict[int, Proposal] = {}
        for kind in sorted(wanted):
            proposals |= self._proposers[kind].propose(plan)
        return Ticket(plan.step, proposals, time.perf_counter() - start_s)

    def observe(self, outcome: Outcome) -> None:
        verdict = outcome.wait()
        for proposer in self._proposers.values():
            proposer.observe(verdict)
