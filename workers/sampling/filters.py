"""min_p, top_k and top_p, without sorting the vocabulary.

Each of the three keeps a prefix of the tokens sorted by (score, then lowest id), so together they
come down to one number per row: how many of the best to keep. The number is found on the best few
candidates, and on more only where those do not settle it.

Probability mass is summed in integers (units of 2^-44 of the most likely token): integer sums do
not depend on their order, so neither the number of candidates nor the shape of the batch can
change a result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.workers.sampling.rows import RowSampler

_NEG_INF = float("-inf")
_LEAST_CANDIDATES = 128
_MOST_CANDIDATES = 4096  # beyond, the vocabulary is sorted
_WIDER = 16  # each further attempt looks at so many times more candidates
_MASS_UNIT = np.float32(2.0**44)  # 2^18 tokens as likely as the best still fit an int64


def apply_filters(scores: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """A new [n, vocab] of `scores`, -inf where a row's min_p, top_k or top_p drops a token."""
    out = torch.full_like(scores, _NEG_INF)
    vocab_size = scores.shape[-1]
    pending = list(range(len(samplers)))
    num_candidates = max(_LEAST_CANDIDATES, *(sampler.top_k + 1 for sampler in samplers))
    while pending:
        if num_candidates > min(_MOST_CANDIDATES, vocab_size):
            num_candidates = vocab_size
        settled = _filter_rows(scores, samplers, pending, num_candidates, out)
        pending = [row for row, is_settled in zip(pending, settled, strict=True) if not is_settled]
        num_candidates *= _WIDER
    return out


def _filter_rows(
    scores: Tensor,
    samplers: Sequence[RowSampler],
    rows: Sequence[int],
    num_candidates: int,
    out: Tensor,
) -> list[bool]:
    """Fill those of `rows` in `out` that the best `num_candidates` settle; tell which they were.

    The few candidates are judged on the host, where small operations are cheapest.
    """
    at = torch.tensor(rows, device=scores.device)
    if len(rows) < len(samplers):
        scores = scores.index_select(0, at)
    samplers = [samplers[row] for row in rows]
    is_everything = num_candidates == scores.shape[-1]
    # Both [n, num_candidates], best first; topk of everything is slower than sorting.
    best = scores.sort(descending=True) if is_everything else scores.topk(num_candidates)
    values: NDArray[np.float32] = best.values.cpu().numpy()
    num_kept = _num_kept(
        values, samplers, _whole_mass(scores, best.values, samplers), is_everything
    )
    settled = (num_kept < num_candidates) | is_everything

    is_kept = np.arange(num_candidates) < num_kept[:, None]
    kept = torch.from_numpy(np.where(is_kept, values, np.float32(_NEG_INF))).to(scores.device)
    if len(rows) == out.shape[0]:
        out.scatter_(1, best.indices, kept)
    else:
        out[at.unsqueeze(-1), best.indices] = kept

    each = np.arange(len(rows))
    last = values[each, num_kept - 1]
    following = values[each, np.minimum(num_kept, num_candidates - 1)]
    for i in np.flatnonzero((last == following) & (num_kept < num_candidates)).tolist():
        out[rows[i]] = _keep_lowest_ids(scores[i], float(last[i]), int(num_kept[i]))
    return list(settled.tolist())


def _num_kept(
    values: NDArray[np.float32],
    samplers: Sequence[RowSampler],
    whole_mass: NDArray[np.int64],
    is_everything: bool,
) -> NDArray[np.int64]:
    """How many of the sorted candidates `values` [n, m] pass in each row.

    m means at least m: unless the candidates are everything, they do not settle the row.
    """
    num_candidates = values.shape[-1]
    best = values[:, :1]
    log_min_p = np.array([[sampler.log_min_p] for sampler in samplers], dtype=np.float32)
    top_k = np.array([sampler.top_k or num_candidates for sampler in samplers])
    num_left: NDArray[np.int64] = np.minimum((values >= best + log_min_p).sum(-1), top_k)
    top_p = np.array([sampler.top_p for sampler in samplers])
    if not (top_p < 1).any():
        return num_left

    is_limited = np.array([_is_limited(sampler) for sampler in samplers])
    mass = (np.exp(values - best) * _MASS_UNIT).astype(np.int64)
    mass[np.arange(num_candidates) >= num_left[:, None]] = 0
    enough = np.where(is_limited, mass.sum(-1), whole_mass) * top_p
    # More may be left by min_p or top_k than the candidates: then their mass is not the total.
    is_total_unknown = is_limited & (num_left == num_candidates) & (not is_everything)
    enough[is_total_unknown | (top_p >= 1)] = np.inf
    mass_before = mass.cumsum(-1) - mass
    num_inside: NDArray[np.int64] = (mass_before < enough[:, None]).sum(-1)
    return np.minimum(num_inside, num_left)


def _whole_mass(
    scores: Tensor, values: Tensor, samplers: Sequence[RowSampler]
) -> NDArray[np.int64]:
    """Each row's mass over the vocabulary; 0 where only top_k or min_p decide what top_p counts."""
    mass = np.zeros(len(samplers), dtype=np.int64)
    rows = [i for i, sampler in enumerate(samplers) if not _is_limited(sampler)]
    if rows:
        at = torch.tensor(rows, device=scores.device)
        relative = (scores[at] - values[at, :1]).exp_().mul_(float(_MASS_UNIT))
        mass[rows] = relative.to(torch.int64).sum(-1).cpu().numpy()
    return mass


def _is_limited(sampler: RowSampler) -> bool:
    """Whether min_p or top_k come before top_p."""
    return sampler.top_k > 0 or sampler.params.min_p > 0


def _keep_lowest_ids(scores: Tensor, threshold: float, num_kept: int) -> Tensor:
    """`scores` [vocab] with the best `num_kept` left, where several tie for the last places."""
    stays = scores > threshold
    tied = (scores == threshold).nonzero().squeeze(-1)
    stays[tied[: num_kept - int(stays.sum())]] = True
    return scores.masked_fill(~stays, _NEG_INF)
