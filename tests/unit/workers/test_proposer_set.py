"""The proposers of one process: who is asked for what."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.catalog.proposers import DRAFT
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import Proposal, RowInit, RowPlan, SampleId, StepPlan, Verdict
from outrider.workers.proposers.base import Proposer, Proposers


class Recorder(Proposer):
    """Knows the rows it was told of, and fails like a real one if asked about another."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.observed: list[Verdict] = []

    def follow(self, plan: StepPlan) -> None:
        self.rows |= {init.row: init.generation for init in plan.admitted}

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        return {
            row.row: Proposal(self.rows[row.row], 3, [7], [0.5])
            for row in plan.rows
            if row.draft_tokens
        }

    def observe(self, verdict: Verdict) -> None:
        self.observed.append(verdict)


def test_a_proposer_knows_rows_that_came_while_nobody_drafted() -> None:
    """As when the draft's pool is full: such a row is drafted for once there is room."""
    recorder = Recorder()
    proposers = Proposers({DRAFT: recorder}, DRAFT)
    plain = RowPlan(4, 1, 2, 0, 0, True, "", 0, (), 0, (), 0)
    init = RowInit(4, 1, SampleId(0, 0), (1, 2), 2, SamplingParams(), seed=0)
    assert proposers.propose(StepPlan(1, 1, (plain,), (init,))).proposals == {}
    drafted = plain._replace(num_tokens=1, depth=1, num_verified=1, proposer=DRAFT, draft_tokens=1)
    assert proposers.propose(StepPlan(1, 2, (drafted,))).proposals[4].tokens == [7]


def test_all_proposers_learn_what_became_of_a_round() -> None:
    recorders = {DRAFT: Recorder(), "ngram": Recorder()}
    verdict = Verdict(1, 1, ())
    Proposers(recorders, DRAFT).observe(verdict)
    assert all(each.observed == [verdict] for each in recorders.values())
