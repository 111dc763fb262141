"""Drafting ahead: while the target verifies a round, the draft continues its likely outcomes.

One pass over the last token and the drafts gives the scores at each position where the target may
go on by itself. Branches, one for each of the likeliest outcomes, are drafted together on scratch
rows, level by level, until the outcome is there. If it is among them, its drafts are the next round
at once; what is missing is drafted as usual. Nobody else needs to know: a branch has the tokens
that the row would draft, for the same positions and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from torch import Tensor

from outrider.catalog.proposers import DRAFT
from outrider.kernels.noise import NoiseStream, gumbel_of
from outrider.kernels.ops import Ops
from outrider.scheduler.types import NONE_AHEAD, AheadCounts, StepPlan
from outrider.workers.proposers.drafting import (
    DraftingRow,
    ids_to_score,
    last_tokens,
    start_drafting,
    take_step,
)
from outrider.workers.proposers.outcome_odds import (
    Alternatives,
    OutcomeOdds,
    RoundView,
    RowOutcome,
)
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.chain import process_rows
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.draw import noise_keys
from outrider.workers.sampling.rows import LogitRow, LogitSpan, RowSampler, logit_rows
from outrider.workers.scratch_rows import ScratchRows

_ALTERNATIVES = 16  # of a position
_SCORED = 512  # of a position that samples: noise can lift one of these to the top


@dataclass(slots=True)
class _Ahead:
    """A round that the target is verifying, and the branches behind it."""

    row: int
    generation: int
    tokens: Sequence[int]  # of the row, its first `base_len` are before the round
    base_len: int
    sampler: RowSampler
    view: RoundView
    branches: dict[RowOutcome, _Branch] = field(default_factory=dict)


@dataclass(slots=True)
class _Branch:
    number: int  # of its scratch row
    drafting: DraftingRow


class DraftAhead:
    """Drafts ahead of the outcomes of the last round; at most as many branches as half of the
    scratch rows."""

    max_branches = 8  # rows of a pass that a CPU runs in one call

    def __init__(self, runner: Runner, ops: Ops, scratch: ScratchRows) -> None:
        self._runner = runner
        self._ops = ops
        self._scratch = scratch
        self._odds = OutcomeOdds()
        self._rounds: Sequence[DraftingRow] = ()
        self._ahead: dict[int, _Ahead] = {}
        self._counts = NONE_AHEAD

    def begin(self, rounds: Sequence[DraftingRow]) -> None:
        """These rounds go to the target."""
        self._rounds, self._ahead = rounds, {}

    def draft(self, plan: StepPlan, has_outcome: Callable[[], bool]) -> None:
        """Draft the rounds of `plan`, the one after, until the outcome is there."""
        depths = {
            (each.row, each.generation): each.depth
            for each in plan.rows
            if each.depth and each.proposer == DRAFT
        }
        num_branches = min(plan.num_branches, len(self._scratch) // 2)
        if not num_branches or has_outcome():
            return
        rounds = [each for each in self._rounds if (each.row, each.generation) in depths]
        rounds = [each for each in rounds if self._fits(each, depths)][:num_branches]
        if not rounds:
            return
        found = self._look(rounds)
        self._ahead = {each.row: each for each in found}
        if has_outcome():
            return
        branches: list[_Branch] = []
        for index, outcome in self._odds.likeliest([each.view for each in found], num_branches):
            depth = depths[found[index].row, found[index].generation]
            number = len(self._scratch) // 2 + len(branches)
            branches.append(self._branch(found[index], index, outcome, depth, number))
        self._draft_levels(branches, plan.least_survival, has_outcome)

    def begin_from_branch(self, each: DraftingRow, start: int) -> None:
        """If the row's text is that of a branch, its round begins with the branch's drafts, and its
        KV is valid up to the last of them; `start` is where the row's own KV ends."""
        ahead = self._ahead.pop(each.row, None)
        tokens = each.span.tokens
        if ahead is None or ahead.generation != each.generation or start < ahead.base_len - 1:
            return
        if len(tokens) == ahead.base_len:
            return
        *accepted, own = tokens[ahead.base_len :]
        if accepted != list(ahead.view.drafts[: len(accepted)]):
            return
        outcome = RowOutcome(len(accepted), own)
        if ahead.view.drafts[len(accepted) :][:1] != [own]:  # else it was not verified
            self._odds.observe(ahead.view, outcome)
        branch = ahead.branches.get(outcome)
        drafts = [] if branch is None else list(branch.drafting.span.drafts[: each.depth])
        hit = AheadCounts(1, int(bool(drafts)), used=len(drafts))
        self._counts = self._counts.plus(hit)
        if branch is None or not drafts:
            return
        self._scratch.copy_back(branch.number, each.row, start, len(tokens) + len(drafts) - 1)
        each.span.drafts = drafts
        each.confidences.extend(branch.drafting.confidences[: len(drafts)])

    def has_branch(self, row: int, outcome: RowOutcome) -> bool:
        return row in self._ahead and outcome in self._ahead[row].branches

    def take_counts(self) -> AheadCounts:
        """Since the last call."""
        counts, self._counts = self._counts, NONE_AHEAD
        return counts

    def _fits(self, each: DraftingRow, depths: dict[tuple[int, int], int]) -> bool:
        start, depth = each.span.base_len, depths[each.row, each.generation]
        return self._scratch.fits(start - 1, start + len(each.span.drafts) + depth)

    def _look(self, rounds: Sequence[DraftingRow]) -> list[_Ahead]:
        """The scores behind each token of these rounds, on the first scratch rows."""
        chunks: list[RowChunk] = []
        for number, each in enumerate(rounds):
            tokens, start = each.span.tokens, each.span.base_len - 1
            row = self._scratch.fork(each.row, number, start, start)
            chunks.append(RowChunk(row, start, [tokens[start], *each.span.drafts]))
        spans = [each.span for each in rounds]
        rows = logit_rows(spans)
        # All ids: what the target chooses against the draft is often an unlikely one.
        logits = self._runner.scores(chunks, range(len(rows)))
        seen = _alternatives(process_rows(logits, rows), rows)
        found: list[_Ahead] = []
        for each in rounds:
            span, count = each.span, each.span.num_rows
            drafts = list(span.drafts)
            is_greedy = span.sampler.is_greedy
            view = RoundView(drafts, list(each.confidences), seen[:count], is_greedy)
            place = (each.row, each.generation, span.tokens, span.base_len)
            found.append(_Ahead(*place, span.sampler, view))
            seen = seen[count:]
        return found

    def _branch(
        self, ahead: _Ahead, trunk: int, outcome: RowOutcome, depth: int, number: int
    ) -> _Branch:
        """On scratch row `number`, after the row's last token and drafts, which are on `trunk`."""
        known = ahead.base_len + outcome.num_accepted
        row = self._scratch.fork(self._scratch.row(trunk), number, ahead.base_len - 1, known)
        tokens = [*ahead.tokens, *ahead.view.drafts[: outcome.num_accepted], outcome.token]
        span = LogitSpan(ahead.sampler, tokens, drafts=[])
        branch = _Branch(number, start_drafting(row, depth, ahead.generation, span))
        ahead.branches[outcome] = branch
        return branch

    def _draft_levels(
        self, branches: Sequence[_Branch], least: float, has_outcome: Callable[[], bool]
    ) -> None:
        active = [each.drafting for each in branches]
        while active and not has_outcome():
            spans = [each.span for each in active]
            num_ids = ids_to_score(spans, self._runner.vocab_size, "shared")
            logits = self._runner.scores(last_tokens(active), range(len(active)), num_ids)
            step = draft_sample(logits, spans, self._ops, "shared", self._runner.vocab)
            take_step(active, step)
            self._counts = self._counts.plus(AheadCounts(drafted=len(active)))
            active = [each for each in active if each.continues(least)]


def _alternatives(scores: Tensor, rows: Sequence[LogitRow]) -> list[Alternatives]:
    """The tokens that the target may choose at each of these rows instead of the draft there."""
    samples = any(not row.sampler.is_greedy for row in rows)
    tokens = _highest(scores, _SCORED if samples else _ALTERNATIVES + 1)
    best = scores.gather(-1, tokens)
    if samples:
        best = best + _noise(tokens, rows)
    best, order = best.sort(dim=-1, descending=True)
    tokens = tokens.gather(-1, order)[:, : _ALTERNATIVES + 1]
    found: list[Alternatives] = []
    best = best[:, : _ALTERNATIVES + 1]
    for row, values, ids in zip(rows, best.tolist(), tokens.tolist(), strict=True):
        drafts = row.span.drafts
        draft = drafts[row.num_drafts] if row.num_drafts < len(drafts) else None
        others = [at for at, token in enumerate(ids) if token != draft and values[at] > -inf]
        del others[_ALTERNATIVES:]
        gaps = [max(values[0] - values[at], 0.0) for at in others]
        found.append(Alternatives([ids[at] for at in others], gaps))
    return found


def _highest(scores: Tensor, count: int) -> Tensor:
    """int64 [n, count]: the ids of the highest scores, in any order. numpy's is three times as fast
    as torch's on CPUs."""
    if count >= scores.shape[-1]:
        return torch.arange(scores.shape[-1]).expand(len(scores), -1)
    return torch.from_numpy(np.argpartition(scores.numpy(), -count, axis=-1)[:, -count:].copy())


def _noise(tokens: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """The noise of these tokens; zero in greedy rows."""
    seeds, positions = noise_keys(rows, tokens.device)
    streams = torch.full_like(seeds, NoiseStream.SHARED)
    noise = gumbel_of(seeds, streams, positions, tokens)
    greedy = [row.sampler.is_greedy for row in rows]
    return noise.masked_fill(torch.tensor(greedy, device=noise.device).unsqueeze(-1), 0.0)
