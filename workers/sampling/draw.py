"""A token from each row of scores: the argmax, or the argmax with the position's Gumbel noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.noise import NoiseStream
from outrider.scheduler.types import NO_TOKEN
from outrider.workers.sampling.rows import LogitRow


class SamplingOps(Protocol):
    """The kernels sampling needs; `outrider.kernels.types.Ops` has them."""

    def gumbel_argmax(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor
    ) -> Tensor: ...

    def gumbel_max(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor, first_id: int
    ) -> tuple[Tensor, Tensor]: ...

    def probability_of(self, scores: Tensor, tokens: Tensor) -> Tensor: ...


def choose(
    scores: Tensor, rows: Sequence[LogitRow], ops: SamplingOps, stream: NoiseStream
) -> Tensor:
    """int64 [N]: the choice of each row, given its scores after the chain."""
    greedy, noisy = greedy_and_noisy(rows)
    if not noisy:
        return argmax(scores)
    if not greedy:
        return _noisy_choice(scores, rows, ops, stream)
    at_greedy = torch.tensor(greedy, device=scores.device)
    at_noisy = torch.tensor(noisy, device=scores.device)
    chosen = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    chosen[at_greedy] = argmax(scores[at_greedy])
    chosen[at_noisy] = _noisy_choice(scores[at_noisy], [rows[i] for i in noisy], ops, stream)
    return chosen


def greedy_and_noisy(rows: Sequence[LogitRow]) -> tuple[list[int], list[int]]:
    """Indices of the greedy rows, and of those that sample."""
    greedy = [i for i, row in enumerate(rows) if row.sampler.is_greedy]
    noisy = [i for i, row in enumerate(rows) if not row.sampler.is_greedy]
    return greedy, noisy


def _noisy_choice(
    scores: Tensor, rows: Sequence[LogitRow], ops: SamplingOps, stream: NoiseStream
) -> Tensor:
    streams = torch.full((len(rows),), stream, dtype=torch.int64, device=scores.device)
    return gumbel_choice(scores, rows, streams, ops)


def gumbel_choice(
    scores: Tensor, rows: Sequence[LogitRow], streams: Tensor, ops: SamplingOps
) -> Tensor:
    """int64 [n]: a sample of softmax(scores) per row, drawn from the noise of `streams` [n]."""
    seeds, positions = noise_keys(rows, scores.device)
    return ops.gumbel_argmax(scores, seeds, streams, positions)


def noise_keys(rows: Sequence[LogitRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [n] seeds and positions."""
    keys = torch.tensor(
        [[row.sampler.seed for row in rows], [row.position for row in rows]],
        dtype=torch.int64,
        device=device,
    )
    return keys[0], keys[1]


def checked(chosen: Tensor, scores: Tensor) -> Tensor:
    """The tokens, but `NO_TOKEN` where the chosen token's score is NaN or infinite."""
    of_chosen = scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return unless_finite(chosen, of_chosen)


def unless_finite(chosen: Tensor, of_chosen: Tensor) -> Tensor:
    """As `checked`, given the scores of the chosen tokens."""
    if of_chosen.device.type == "cpu" and all(map(math.isfinite, of_chosen.tolist())):
        return chosen  # the common case: torch would need several operations
    return chosen.masked_fill(~of_chosen.isfinite(), NO_TOKEN)


def argmax(scores: Tensor) -> Tensor:
    """int64 [N]: the best token of each row, the lowest id among equals."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        # numpy's is an order of magnitude faster than torch's on CPUs.
        return torch.from_numpy(scores.detach().numpy().argmax(-1))
    return scores.argmax(-1)
