"""min_p, top_k and top_p, usually without sorting the vocabulary.

Each of the three keeps a prefix of the tokens sorted by (score, then lowest id), so together they
reduce to one number per row: how many of the best tokens to keep. It is found on the best few
candidates; only rows so flat that these do not settle it are sorted.

Probability mass is summed in integers, see `outrider.kernels.mass`: neither the number of
candidates nor the shape of the batch nor the device can change a result, and captured passes
(`outrider.kernels.gpu.filters`) keep the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.mass import mass_in_units
from outrider.workers.sampling.rows import RowSampler

_NEG_INF = float("-inf")
_MIN_CANDIDATES = 128
_MORE_CANDIDATES = 2048  # for rows that the first few do not settle
_MAX_CANDIDATES = 4096  # finding more takes longer than sorting


def apply_filters(scores: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """A new [n, vocab] of `scores`, -inf where a row's min_p, top_k or top_p drops a token."""
    out = torch.full_like(scores, _NEG_INF)
    whole_mass = _whole_mass(scores, samplers)
    first = max(_MIN_CANDIDATES, *(sampler.top_k + 1 for sampler in samplers))
    unsettled = np.arange(len(samplers))
    for num_candidates in (first, _MORE_CANDIDATES):
        if len(unsettled) and num_candidates < min(_MAX_CANDIDATES, scores.shape[-1]):
            unsettled = _settle(
                scores, samplers, whole_mass, unsettled, out, num_candidates=num_candidates
            )
    if len(unsettled):
        _settle(scores, samplers, whole_mass, unsettled, out, num_candidates=None)
    return out


def _settle(
    scores: Tensor,
    samplers: Sequence[RowSampler],
    whole_mass: NDArray[np.int64],
    rows: NDArray[np.int64],
    out: Tensor,
    *,
    num_candidates: int | None,
) -> NDArray[np.int64]:
    """Fill some rows of `out` from their best candidates (None: by sorting); returns the rows that
    are still unsettled."""
    if len(rows) == len(samplers) and num_candidates is not None:
        return _filter_by_candidates(scores, samplers, whole_mass, num_candidates, out)
    at = torch.from_numpy(rows).to(scores.device)
    own_scores, own_samplers = scores[at], [samplers[i] for i in rows.tolist()]
    if num_candidates is None:
        out[at] = _filter_by_sorting(own_scores, own_samplers, whole_mass[rows])
        return rows[:0]
    own_out = torch.full_like(own_scores, _NEG_INF)
    still_open = _filter_by_candidates(
        own_scores, own_samplers, whole_mass[rows], num_candidates, own_out
    )
    out[at] = own_out
    return rows[still_open]


def _filter_by_candidates(
    scores: Tensor,
    samplers: Sequence[RowSampler],
    whole_mass: NDArray[np.int64],
    num_candidates: int,
    out: Tensor,
) -> NDArray[np.int64]:
    """Fill the rows of `out` that the best `num_candidates` settle; return the other rows.

    The few candidates are processed on the host, where small operations are cheapest.
    """
    best = scores.topk(num_candidates)  # [n, num_candidates], best first
    values: NDArray[np.float32] = best.values.cpu().numpy()
    mass = _candidate_mass(best.values, samplers)
    num_kept = _num_kept(values, mass, samplers, whole_mass, is_everything=False)
    is_kept = np.arange(num_candidates) < num_kept[:, None]
    kept = np.where(is_kept, values, np.float32(_NEG_INF))
    out.scatter_(1, best.indices, torch.from_numpy(kept).to(scores.device))

    settled = np.flatnonzero(num_kept < num_candidates)
    num_kept = num_kept[settled]
    last = values[settled, num_kept - 1]
    is_cut_tie = last == values[settled, num_kept]
    for i in np.flatnonzero(is_cut_tie).tolist():
        row = int(settled[i])
        out[row] = _keep_lowest_ids(scores[row], float(last[i]), int(num_kept[i]))
    return np.setdiff1d(np.arange(len(samplers)), settled)


def _filter_by_sorting(
    scores: Tensor, samplers: Sequence[RowSampler], whole_mass: NDArray[np.int64]
) -> Tensor:
    # numpy sorts a row of float32 ten times as fast as torch does on a CPU.
    values: NDArray[np.float32] = np.ascontiguousarray(np.sort(scores.cpu().numpy())[:, ::-1])
    mass = _candidate_mass(torch.from_numpy(values).to(scores.device), samplers)
    num_kept = _num_kept(values, mass, samplers, whole_mass, is_everything=True)
    last = np.take_along_axis(values, num_kept[:, None] - 1, axis=-1)
    num_at_least = (values >= last).sum(-1)
    out = scores.masked_fill(scores < torch.from_numpy(last).to(scores.device), _NEG_INF)
    for i in np.flatnonzero(num_at_least > num_kept).tolist():
        out[i] = _keep_lowest_ids(scores[i], float(last[i, 0]), int(num_kept[i]))
    return out


def _num_kept(
    values: NDArray[np.float32],
    mass: NDArray[np.int64] | None,
    samplers: Sequence[RowSampler],
    whole_mass: NDArray[np.int64],
    is_everything: bool,
) -> NDArray[np.int64]:
    """How many of the sorted candidates `values` [n, m] with their `mass` pass in each row.

    A result of m means at least m: unless the candidates are the whole row, it is not settled.
    """
    num_candidates = values.shape[-1]
    best = values[:, :1]
    log_min_p = np.array([[sampler.log_min_p] for sampler in samplers], dtype=np.float32)
    top_k = np.array([sampler.top_k or num_candidates for sampler in samplers])
    num_left: NDArray[np.int64] = np.minimum((values >= best + log_min_p).sum(-1), top_k)
    if mass is None:
        return num_left

    top_p = np.array([sampler.top_p for sampler in samplers])
    is_limited = np.array([_is_limited(sampler) for sampler in samplers])
    mass[np.arange(num_candidates) >= num_left[:, None]] = 0
    enough = np.where(is_limited, mass.sum(-1), whole_mass) * top_p
    # min_p or top_k may keep more than the candidates, whose mass then is not the total.
    is_total_unknown = is_limited & (num_left == num_candidates) & (not is_everything)
    enough[is_total_unknown | (top_p >= 1)] = np.inf
    mass_before = mass.cumsum(-1) - mass
    num_inside: NDArray[np.int64] = (mass_before < enough[:, None]).sum(-1)
    return np.minimum(num_inside, num_left)


def _whole_mass(scores: Tensor, samplers: Sequence[RowSampler]) -> NDArray[np.int64]:
    """Each row's mass over the vocabulary; 0 where min_p or top_k decide what top_p counts."""
    mass = np.zeros(len(samplers), dtype=np.int64)
    rows = [i for i, sampler in enumerate(samplers) if not _is_limited(sampler)]
    if rows:
        unlimited = scores[torch.tensor(rows, device=scores.device)]
        in_units = mass_in_units(unlimited, unlimited.amax(-1, keepdim=True))
        mass[rows] = in_units.sum(-1).cpu().numpy()
    return mass


def _candidate_mass(values: Tensor, samplers: Sequence[RowSampler]) -> NDArray[np.int64] | None:
    """The mass of sorted candidates [n, m]; None where no row has a top_p."""
    if all(sampler.top_p >= 1 for sampler in samplers):
        return None
    mass: NDArray[np.int64] = mass_in_units(values, values[:, :1]).cpu().numpy()
    return mass


def _is_limited(sampler: RowSampler) -> bool:
    """Whether min_p or top_k come before top_p."""
    return sampler.top_k > 0 or sampler.params.min_p > 0


def _keep_lowest_ids(scores: Tensor, threshold: float, num_kept: int) -> Tensor:
    """`scores` [vocab] with the best `num_kept` left; ties at the cut go to the lowest ids."""
    stays = scores > threshold
    tied = (scores == threshold).nonzero().squeeze(-1)
    stays[tied[: num_kept - int(stays.sum())]] = True
    return scores.masked_fill(~stays, _NEG_INF)
