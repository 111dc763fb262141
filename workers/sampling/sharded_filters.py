"""min_p, top_k and top_p where every rank holds the scores of some tokens only.

Whether a token passes follows from how many tokens, and how much mass, come before it in order of
score: sums over the ranks, exact because mass is an integer (see `filters`). So the winner of a
contest without filters is put to the test. If it fails, so does every token behind it, and those
before it are contested again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from outrider.workers.sampling.contest import Draw, Winners, contest
from outrider.workers.sampling.draw import choose
from outrider.workers.sampling.filters import apply_filters, mass_in_units
from outrider.workers.sampling.rows import LogitRow, RowSampler
from outrider.workers.sampling.vocab import VocabPart

_NEG_INF = float("-inf")
_MAX_REPEATS = 3  # then the rows that are left are gathered


class _OpenRows(NamedTuple):
    """Rows still without a token."""

    at: Tensor  # int64 [n], their places in the batch
    rows: list[LogitRow]
    scores: Tensor  # [n, held], before filters
    highest: Tensor  # float32 [n], the best score on any rank
    least: Tensor  # float32 [n], the lowest score min_p leaves
    top_k_mass: Tensor  # int64 [n], what top_p counts where top_k is set too; else 0

    @property
    def samplers(self) -> list[RowSampler]:
        return [row.sampler for row in self.rows]

    def take(self, members: Sequence[int]) -> _OpenRows:
        which = torch.tensor(members, dtype=torch.int64, device=self.at.device)
        return _OpenRows(
            self.at[which],
            [self.rows[i] for i in members],
            self.scores[which],
            self.highest[which],
            self.least[which],
            self.top_k_mass[which],
        )


def choose_filtered(scores: Tensor, rows: list[LogitRow], draw: Draw, winners: Winners) -> Tensor:
    """int64 [n]: the choices of rows that all have filters.

    `winners` are those of the contest without filters, with each rank's highest score as the
    statistic.
    """
    open_rows = _open(scores, rows, winners.statistics.amax(0).float(), draw.vocab)
    tokens = winners.tokens.clone()
    for _ in range(_MAX_REPEATS):
        open_rows, left = _failed(open_rows, winners, draw.vocab)
        if not open_rows.rows:
            return tokens
        winners = contest(left, open_rows.rows, draw)
        tokens[open_rows.at] = winners.tokens
    open_rows, _ = _failed(open_rows, winners, draw.vocab)
    if open_rows.rows:
        whole = apply_filters(draw.vocab.gather(open_rows.scores), open_rows.samplers)
        tokens[open_rows.at] = choose(whole, open_rows.rows, draw.ops, draw.stream)
    return tokens


def _failed(open_rows: _OpenRows, winners: Winners, vocab: VocabPart) -> tuple[_OpenRows, Tensor]:
    """The rows whose winner its filters drop, and their scores of the tokens before it."""
    before = _is_before(open_rows.scores, winners, vocab)
    failed = np.flatnonzero(~_passes(open_rows, winners, before, vocab)).tolist()
    still_open = open_rows.take(failed)
    return still_open, still_open.scores.masked_fill(~before[failed], _NEG_INF)


def _open(scores: Tensor, rows: list[LogitRow], highest: Tensor, vocab: VocabPart) -> _OpenRows:
    samplers = [row.sampler for row in rows]
    log_min_p = torch.tensor([sampler.log_min_p for sampler in samplers], device=scores.device)
    least = highest + log_min_p
    at = torch.arange(len(rows), device=scores.device)
    top_k_mass = torch.zeros_like(at)
    both = [i for i, sampler in enumerate(samplers) if sampler.top_k and sampler.top_p < 1]
    if both:
        which = at[both]
        top_k = [samplers[i].top_k for i in both]
        top_k_mass[which] = _top_k_mass(scores[which], highest[which], least[which], top_k, vocab)
    return _OpenRows(at, rows, scores, highest, least, top_k_mass)


def _top_k_mass(
    scores: Tensor, highest: Tensor, least: Tensor, top_k: list[int], vocab: VocabPart
) -> Tensor:
    """int64 [n]: the mass of the tokens that min_p and top_k leave, from each rank's best few."""
    num_best = max(top_k)
    num_sent = min(num_best, max(vocab.widths))
    own = scores.topk(min(num_sent, scores.shape[-1])).values
    sent = functional.pad(own, (0, num_sent - own.shape[-1]), value=_NEG_INF)
    gathered = vocab.group.all_gather(sent)  # [size, n, num_sent]
    best = gathered.transpose(0, 1).flatten(1).topk(num_best).values
    places = torch.arange(num_best, device=scores.device)
    is_left = places < torch.tensor(top_k, device=scores.device).unsqueeze(-1)
    is_left &= best >= least.unsqueeze(-1)
    return mass_in_units(best, highest.unsqueeze(-1)).masked_fill(~is_left, 0).sum(-1)


def _is_before(scores: Tensor, winners: Winners, vocab: VocabPart) -> Tensor:
    """Which of this rank's tokens come before the winner in order of (score, then lowest id)."""
    held = vocab.held
    ids = torch.arange(held.start, held.stop, device=scores.device)
    of_winner = winners.scores.unsqueeze(-1)
    is_equal_and_lower = (scores == of_winner) & (ids < winners.tokens.unsqueeze(-1))
    return (scores > of_winner) | is_equal_and_lower


def _passes(
    open_rows: _OpenRows, winners: Winners, before: Tensor, vocab: VocabPart
) -> NDArray[np.bool_]:
    """Whether each winner is among the tokens its row's filters keep."""
    samplers = open_rows.samplers
    top_k = np.array([sampler.top_k or vocab.size for sampler in samplers])
    top_p = np.array([sampler.top_p for sampler in samplers])
    sums = [before.sum(-1)]
    if (top_p < 1).any():
        mass = mass_in_units(open_rows.scores, open_rows.highest.unsqueeze(-1))
        is_out = open_rows.scores < open_rows.least.unsqueeze(-1)
        sums += [mass.masked_fill(~before, 0).sum(-1), mass.masked_fill(is_out, 0).sum(-1)]
    summed = vocab.group.all_reduce(torch.stack(sums))
    passes: NDArray[np.bool_] = (winners.scores >= open_rows.least).cpu().numpy()
    counts: NDArray[np.int64] = summed.cpu().numpy()
    passes &= counts[0] < top_k
    if (top_p < 1).any():
        top_k_mass: NDArray[np.int64] = open_rows.top_k_mass.cpu().numpy()
        enough = np.where(top_k < vocab.size, top_k_mass, counts[2]) * top_p
        passes &= (top_p >= 1) | (counts[1] < enough)
    return passes
