"""Drafting ahead of outcomes: proposals are those of drafting behind them, whichever come true."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, save_checkpoint

from outrider.catalog.proposers import DRAFT
from outrider.kernels.ops import select_ops
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import (
    NONE_AHEAD,
    Proposal,
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Verdict,
)
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.scratch_rows import ScratchRows
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32, deterministic=True)
ROWS, BLOCK, BLOCKS_EACH, LENGTH, NUM_SCRATCH = 3, 4, 4, 96, 16
ROW_BLOCKS = LENGTH // BLOCK
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8)
FILTERED = SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.3)
NEVER = lambda: False  # noqa: E731


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    save_checkpoint(folder, "llama")
    return folder


def make_draft(folder: Path, *, is_ahead: bool = True) -> DraftProposer:
    decoder = load_model(folder, dtype=torch.float32, device=CPU, ops=OPS)
    num_blocks = ROWS * ROW_BLOCKS + NUM_SCRATCH * BLOCKS_EACH
    kv = KVCache(decoder.spec, num_blocks, BLOCK, torch.float32, CPU, is_interleaved=True)
    runner = Runner(decoder, kv, ROWS, LENGTH, VOCAB_SIZE)
    scratch = ScratchRows(runner, NUM_SCRATCH, BLOCKS_EACH) if is_ahead else None
    return DraftProposer(RowTable(ROWS), runner, OPS, "shared", scratch)


class Pair:
    """A draft that drafts ahead and one that does not, told the same outcomes."""

    def __init__(self, folder: Path, seed: int, params: Sequence[SamplingParams]) -> None:
        self.rng = random.Random(seed)
        self.drafts = make_draft(folder), make_draft(folder, is_ahead=False)
        self.step, self.num_branches = 1, 8
        self.texts: list[list[int]] = []
        inits, rows = [], []
        for row, each in enumerate(params):
            text = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randint(3, 9))]
            self.texts.append(text)
            sample = SampleId(0, row)
            inits.append(
                RowInit(row, 1, sample, tuple(text), len(text), each, 7 + row, proposer=DRAFT)
            )
            blocks = tuple(range(row * ROW_BLOCKS, (row + 1) * ROW_BLOCKS))
            rows.append(
                self._row(row, self.rng.randint(1, 3), len(text))._replace(draft_blocks=blocks)
            )
        self.plan = StepPlan(1, 1, tuple(rows), tuple(inits))
        self.found = self._propose()

    def _row(self, row: int, depth: int, count: int = 2) -> RowPlan:
        return RowPlan(row, 1, 1, depth, depth, True, DRAFT, 0, (), 0, (), count)

    def _propose(self) -> dict[int, Proposal]:
        for draft in self.drafts:
            draft.follow(self.plan)
        ahead, behind = (dict(draft.propose(self.plan)) for draft in self.drafts)
        assert {row: each.tokens for row, each in ahead.items()} == {
            row: each.tokens for row, each in behind.items()
        }
        for row, each in ahead.items():
            assert each.confidences == pytest.approx(behind[row].confidences, rel=1e-4)
        return ahead

    def next_step(
        self, has_outcome: Callable[[], bool], depths: Sequence[int], least: float = 0.0
    ) -> None:
        """Draft ahead until then; the outcome; the next round."""
        self.step += 1
        rows = tuple(self._row(row, depth) for row, depth in enumerate(depths) if depth)
        self.plan = StepPlan(
            1, self.step, rows, num_branches=self.num_branches, least_survival=least
        )
        self.drafts[0].draft_ahead(self.plan, has_outcome)
        verdict = Verdict(1, self.step - 1, tuple(map(self._outcome, sorted(self.found))))
        for draft in self.drafts:
            draft.observe(verdict)
        self.found = self._propose()
        first, second = (draft.computed for draft in self.drafts)
        assert first == second

    def _outcome(self, row: int) -> RowVerdict:
        text, drafts = self.texts[row], list(self.found[row].tokens)
        accepted = self.rng.choice([len(drafts), self.rng.randint(0, len(drafts))])
        tokens = (*drafts[:accepted], self._own(row, drafts[:accepted]))
        verdict = RowVerdict(row, 1, len(text), len(drafts), len(drafts), accepted, tokens)
        text += tokens
        return verdict

    def _own(self, row: int, accepted: Sequence[int]) -> int:
        """A token that a branch has, if there are any."""
        assert self.drafts[0]._ahead is not None
        ahead = self.drafts[0]._ahead._ahead.get(row)
        own = [] if ahead is None else [o.token for o in ahead.branches if o[0] == len(accepted)]
        return self.rng.choice(own) if own and self.rng.random() < 0.8 else self.rng.randrange(99)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "noise", "filters"])
@pytest.mark.parametrize("seed", range(3))
def test_proposals_are_those_of_drafting_behind_the_outcome(
    folder: Path, seed: int, params: SamplingParams
) -> None:
    pair = Pair(folder, seed, [params, params, GREEDY][: 1 + seed])
    for _ in range(14):
        calls = iter(range(pair.rng.choice([0, 2, 3, 4, 5, 99, 99])))
        depths = [pair.rng.randint(1, 3) for _ in pair.texts]
        pair.next_step(lambda calls=calls: next(calls, None) is None, depths)  # type: ignore[misc]
    found = pair.drafts[0].take_ahead_counts()
    assert 0 < found.hits <= found.rounds and 0 < found.used < found.drafted


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_go_on_from_a_branch_share_passes_with_rows_that_missed(
    folder: Path, seed: int
) -> None:
    """Branches of one token, of rounds of three: chunks of both kinds, in any order."""
    pair = Pair(folder, seed, [GREEDY, SAMPLED, GREEDY])
    for _ in range(8):
        calls = iter(range(3))
        pair.next_step(lambda calls=calls: next(calls, None) is None, [3, 3, 3])  # type: ignore[misc]
    found = pair.drafts[0].take_ahead_counts()
    assert 0 < found.hits < found.rounds


def test_a_row_may_stop_early(folder: Path) -> None:
    pair = Pair(folder, 5, [GREEDY, GREEDY])
    lengths = []
    for _ in range(10):
        pair.next_step(NEVER, [3, 3], 0.05)
        lengths += [len(each.tokens) for each in pair.found.values()]
    assert set(lengths) > {1} and min(lengths) < 3
    assert pair.drafts[0].take_ahead_counts().hits


def test_a_row_may_pause(folder: Path) -> None:
    pair = Pair(folder, 5, [GREEDY, GREEDY])
    for depths in ([2, 2], [0, 3], [0, 2], [0, 2], [0, 3]):
        pair.next_step(NEVER, depths)
    assert pair.drafts[0].take_ahead_counts().hits


@pytest.mark.parametrize(("num_branches", "is_there"), [(8, True), (0, False)])
def test_nothing_is_drafted_where_no_branches_are_planned_or_the_outcome_is_there(
    folder: Path, num_branches: int, is_there: bool
) -> None:
    pair = Pair(folder, 1, [GREEDY])
    pair.num_branches = num_branches
    pair.next_step(lambda: is_there, [2])
    assert pair.drafts[0].take_ahead_counts() == NONE_AHEAD


def test_a_row_that_is_adopted_has_no_branches(folder: Path) -> None:
    pair = Pair(folder, 2, [GREEDY])
    draft, text = pair.drafts[0], pair.texts[0]
    plan = StepPlan(1, 2, (pair._row(0, 2),), num_branches=8)
    draft.draft_ahead(plan, NEVER)
    assert draft._ahead is not None and draft._ahead._ahead
    known = (*text, pair.found[0].tokens[0], 5)
    init = RowInit(0, 1, SampleId(0, 0), known, len(text), GREEDY, 7, draft_cached=len(text))
    draft.adopt(2, [init])
    after = StepPlan(2, 1, (pair._row(0, 2),), num_branches=8)
    draft.follow(after)
    assert draft.propose(after)[0].base_len == len(known)
    assert draft.take_ahead_counts().rounds == 0
