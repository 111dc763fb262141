"""Argmax of each row when the vocabulary is sharded over ranks.

Each rank contributes its best token with a few numbers; one all-gather of these decides. The
highest score wins, noise included; ties go to the lowest rank, which holds the lowest ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.noise import NoiseStream
from outrider.workers.sampling.draw import SamplingOps, argmax, greedy_and_noisy, noise_keys
from outrider.workers.sampling.rows import LogitRow
from outrider.workers.sampling.vocab import VocabPart

# The fields that a rank contributes.
_NOISY, _TOKEN, _SCORE, _STATISTIC = range(4)


class Draw(NamedTuple):
    """How tokens are drawn: the kernels, the noise stream and the ranks."""

    ops: SamplingOps
    stream: NoiseStream
    vocab: VocabPart


class Winners(NamedTuple):
    """The best token of each row over all ranks."""

    tokens: Tensor  # int64 [n]
    offers: Tensor  # float64 [fields, n], of the winning ranks
    gathered: Tensor  # float64 [size, fields, n]

    @property
    def scores(self) -> Tensor:
        """float32 [n]: the scores of the tokens, without noise."""
        return self.offers[_SCORE].float()

    @property
    def statistics(self) -> Tensor:
        """float64 [size, n]: the statistic of each rank."""
        return self.gathered[:, _STATISTIC]

    def take(self, at: Tensor) -> Winners:
        return Winners(self.tokens[at], self.offers[:, at], self.gathered[:, :, at])


def sharded_argmax(
    scores: Tensor, rows: Sequence[LogitRow], draw: Draw, statistic: Tensor | None = None
) -> Winners:
    """Each row's choice from the ranks' `scores` [n, held], ignoring filters.

    `statistic` [n] is gathered along with every row.
    """
    noisy, columns = _offers(scores, rows, draw)
    own = scores.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
    # float64 holds ids and float32 scores alike without rounding.
    tokens = columns.double() + draw.vocab.held.start
    fields = (noisy, tokens, own) if statistic is None else (noisy, tokens, own, statistic)
    gathered = draw.vocab.group.all_gather(torch.stack(fields))
    owners = gathered[:, _NOISY].argmax(0)
    won = gathered.gather(0, owners.expand(1, len(fields), -1)).squeeze(0)
    return Winners(won[_TOKEN].long(), won, gathered)


def _offers(scores: Tensor, rows: Sequence[LogitRow], draw: Draw) -> tuple[Tensor, Tensor]:
    """This rank's best of each row: its score, noise included, and its column."""
    greedy, noisy = greedy_and_noisy(rows)
    if not noisy:
        columns = argmax(scores)
        return scores.gather(-1, columns.unsqueeze(-1)).squeeze(-1), columns
    if not greedy:
        return _noisy_offers(scores, rows, draw)
    best = torch.empty(len(rows), dtype=torch.float32, device=scores.device)
    columns = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    for members in (greedy, noisy):
        at = torch.tensor(members, device=scores.device)
        best[at], columns[at] = _offers(scores[at], [rows[i] for i in members], draw)
    return best, columns


def _noisy_offers(scores: Tensor, rows: Sequence[LogitRow], draw: Draw) -> tuple[Tensor, Tensor]:
    seeds, positions = noise_keys(rows, scores.device)
    streams = torch.full_like(seeds, draw.stream)
    return draw.ops.gumbel_max(scores, seeds, streams, positions, draw.vocab.held.start)
