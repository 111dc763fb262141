"""min_p, top_k and top_p when the vocabulary is sharded over ranks.

Whether a token passes follows from how many tokens, and how much mass, come before it in order of
score: sums over the ranks, exact because mass is an integer (see `filters`). So the argmax without
filters is tested. If it fails, so does every token after it, and the argmax among those before it
is tested next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from outrider.kernels.mass import mass_in_units
from outrider.workers.sampling.draw import choose
from outrider.workers.sampling.filters import apply_filters
from outrider.workers.sampling.rows import LogitRow, RowSampler
from outrider.workers.sampling.sharded_argmax import Draw, Winners, sharded_argmax
from outrider.workers.sampling.vocab import VocabPart

_NEG_INF = float("-inf")
_MAX_REPEATS = 3  # then the remaining rows are gathered


class _OpenRows(NamedTuple):
    """Rows whose winner has not been tested yet."""

    at: Tensor  # int64 [n], their places in the batch
    rows: list[LogitRow]
    scores: Tensor  # float32 [n, held], before filters
    highest: Tensor  # float32 [n], the best score on any rank
    least: Tensor  # float32 [n], the lowest score min_p leaves
    mass: Tensor  # int64 [n]; summed over the ranks it is the mass that top_p is a share of

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
            self.mass[which],
        )


class _TokensBefore(NamedTuple):
    """The tokens of this rank before each row's winner, in order of (score, then lowest id)."""

    rows: Tensor  # int64 [m], which row each belongs to
    columns: Tensor  # int64 [m]
    scores: Tensor  # float32 [m]


def choose_filtered(scores: Tensor, rows: list[LogitRow], draw: Draw, winners: Winners) -> Tensor:
    """int64 [n]: the choices of rows that all have filters.

    `winners` are those of `sharded_argmax` without filters, with each rank's highest score as the
    statistic.
    """
    open_rows = _open(scores, rows, winners.statistics.amax(0).float(), draw.vocab)
    tokens = winners.tokens.clone()
    for repeats_left in reversed(range(_MAX_REPEATS + 1)):
        before = _tokens_before(open_rows.scores, winners, draw.vocab)
        failed = np.flatnonzero(~_passes(open_rows, winners, before, draw.vocab)).tolist()
        if not failed:
            break
        if repeats_left:
            left = torch.full_like(open_rows.scores, _NEG_INF)
            left[before.rows, before.columns] = before.scores
            open_rows = open_rows.take(failed)
            winners = sharded_argmax(left[failed], open_rows.rows, draw)
            tokens[open_rows.at] = winners.tokens
        else:
            open_rows = open_rows.take(failed)
            whole = apply_filters(draw.vocab.gather(open_rows.scores), open_rows.samplers)
            tokens[open_rows.at] = choose(whole, open_rows.rows, draw.ops, draw.stream)
    return tokens


def _open(scores: Tensor, rows: list[LogitRow], highest: Tensor, vocab: VocabPart) -> _OpenRows:
    log_min_p = torch.tensor([row.sampler.log_min_p for row in rows], device=scores.device)
    at = torch.arange(len(rows), device=scores.device)
    opened = _OpenRows(at, rows, scores, highest, highest + log_min_p, torch.zeros_like(at))
    for has_top_k, mass_of in ((False, _own_mass), (True, _top_k_mass)):
        members = [
            i
            for i, sampler in enumerate(opened.samplers)
            if sampler.top_p < 1 and bool(sampler.top_k) == has_top_k
        ]
        if members:
            opened.mass[members] = mass_of(opened.take(members), vocab)
    return opened


def _own_mass(rows: _OpenRows, vocab: VocabPart) -> Tensor:
    """int64 [n]: the mass of this rank's tokens that min_p leaves."""
    mass = mass_in_units(rows.scores, rows.highest.unsqueeze(-1))
    if any(sampler.params.min_p > 0 for sampler in rows.samplers):
        mass.masked_fill_(rows.scores < rows.least.unsqueeze(-1), 0)
    return mass.sum(-1)


def _top_k_mass(rows: _OpenRows, vocab: VocabPart) -> Tensor:
    """int64 [n]: the mass of the tokens that min_p and top_k leave, from the best k of each rank.

    Every rank then has the total; only the first contributes it to the sum.
    """
    top_k = torch.tensor([[sampler.top_k] for sampler in rows.samplers], device=rows.at.device)
    num_best = int(top_k.max())
    num_sent = min(num_best, max(vocab.widths))
    own = rows.scores.topk(min(num_sent, len(vocab.held))).values
    sent = functional.pad(own, (0, num_sent - own.shape[-1]), value=_NEG_INF)
    gathered = vocab.group.all_gather(sent)  # [size, n, num_sent]
    best = gathered.transpose(0, 1).flatten(1).topk(num_best).values
    is_left = best >= rows.least.unsqueeze(-1)
    is_left &= torch.arange(num_best, device=rows.at.device) < top_k
    mass = mass_in_units(best, rows.highest.unsqueeze(-1)).masked_fill_(~is_left, 0).sum(-1)
    return mass if vocab.group.rank == 0 else torch.zeros_like(mass)


def _tokens_before(scores: Tensor, winners: Winners, vocab: VocabPart) -> _TokensBefore:
    of_winner, winner = winners.scores, winners.tokens
    rows, columns = (scores >= of_winner.unsqueeze(-1)).nonzero(as_tuple=True)
    values = scores[rows, columns]
    is_before = (values > of_winner[rows]) | (columns + vocab.held.start < winner[rows])
    return _TokensBefore(rows[is_before], columns[is_before], values[is_before])


def _passes(
    open_rows: _OpenRows, winners: Winners, before: _TokensBefore, vocab: VocabPart
) -> NDArray[np.bool_]:
    """Whether each winner is among the tokens its row's filters keep."""
    mass = mass_in_units(before.scores, open_rows.highest[before.rows])
    own = torch.zeros(3, len(open_rows.rows), dtype=torch.int64, device=mass.device)
    own[0].index_add_(0, before.rows, torch.ones_like(before.rows))
    own[1].index_add_(0, before.rows, mass)
    own[2] = open_rows.mass
    summed: NDArray[np.int64] = vocab.group.all_reduce(own).cpu().numpy()
    num_before, mass_before, whole_mass = summed
    samplers = open_rows.samplers
    top_k = np.array([sampler.top_k or vocab.size for sampler in samplers])
    top_p = np.array([sampler.top_p for sampler in samplers])
    passes: NDArray[np.bool_] = (winners.scores >= open_rows.least).cpu().numpy()
    passes &= num_before < top_k
    passes &= (top_p >= 1) | (mass_before < whole_mass * top_p)
    return passes
