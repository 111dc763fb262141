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

import torch
from torch import Tensor

from outrider.workers.sampling.rows import RowSampler

_NEG_INF = float("-inf")
_LEAST_CANDIDATES = 128
_MOST_CANDIDATES = 4096  # beyond, the vocabulary is sorted
_WIDER = 16  # each further attempt looks at so many times more candidates
_MASS_UNIT = 2.0**44  # the mass of 2^18 tokens as likely as the best still fits an int64


def apply_filters(scores: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """A new [n, vocab] of `scores`, -inf where a row's min_p, top_k or top_p drops a token."""
    out = torch.full_like(scores, _NEG_INF)
    pending = list(range(len(samplers)))
    num_candidates = max(_LEAST_CANDIDATES, *(sampler.top_k + 1 for sampler in samplers))
    while pending:
        if num_candidates > _MOST_CANDIDATES:
            num_candidates = scores.shape[-1]
        num_candidates = min(num_candidates, scores.shape[-1])
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
    """Fill those of `rows` in `out` that the best `num_candidates` settle; tell which they were."""
    index = torch.tensor(rows, device=scores.device)
    if len(rows) < len(samplers):
        scores = scores.index_select(0, index)
    is_everything = num_candidates == scores.shape[-1]
    # Both [n, num_candidates], best first; topk of everything is slower than sorting.
    best = scores.sort(descending=True) if is_everything else scores.topk(num_candidates)
    values, token_ids = best
    num_kept = _num_kept(scores, values, [samplers[row] for row in rows])
    settled = (num_kept < num_candidates) | is_everything

    order = torch.arange(num_candidates, device=scores.device)
    kept = values.masked_fill(order >= num_kept.unsqueeze(-1), _NEG_INF)
    if len(rows) == out.shape[0]:
        out.scatter_(1, token_ids, kept)
    else:
        out[index.unsqueeze(-1), token_ids] = kept

    last = values.gather(1, (num_kept - 1).unsqueeze(-1))
    following = values.gather(1, num_kept.clamp(max=num_candidates - 1).unsqueeze(-1))
    cuts_a_tie = ((last == following).squeeze(-1) & (num_kept < num_candidates)).tolist()
    for local, row in enumerate(rows):
        if cuts_a_tie[local]:
            out[row] = _keep_lowest_ids(scores[local], last[local], int(num_kept[local]))
    return list(settled.tolist())


def _num_kept(scores: Tensor, values: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """int64 [n]: how many of the sorted candidates `values` [n, m] pass.

    m means "at least m": the candidates do not settle the row, unless they are everything.
    """
    num_candidates, device = values.shape[-1], values.device
    best = values[:, :1]
    log_min_p = torch.tensor([s.log_min_p for s in samplers], dtype=torch.float32, device=device)
    num_kept = (values >= best + log_min_p.unsqueeze(-1)).sum(-1)
    top_k = torch.tensor([s.top_k or num_candidates for s in samplers], device=device)
    num_kept = torch.minimum(num_kept, top_k)
    nucleus = [i for i, sampler in enumerate(samplers) if sampler.top_p < 1]
    if not nucleus:
        return num_kept

    unlimited = [i for i in nucleus if samplers[i].top_k == 0 and samplers[i].params.min_p == 0]
    order = torch.arange(num_candidates, device=device)
    is_in = order < num_kept.unsqueeze(-1)
    mass = _mass(values, best) * is_in
    total = mass.sum(-1)
    if unlimited:
        at = torch.tensor(unlimited, device=device)
        total[at] = _mass(scores[at], best[at]).sum(-1)
    top_p = torch.tensor([s.top_p for s in samplers], dtype=torch.float64, device=device)
    before = (mass.cumsum(-1) - mass).double()
    num_inside = (is_in & (before < (total * top_p).unsqueeze(-1))).sum(-1)

    is_nucleus = torch.tensor([s.top_p < 1 for s in samplers], device=device)
    # Without the tokens beyond the candidates the total of a limited row is not known.
    is_total_known = num_kept < num_candidates
    if unlimited:
        is_total_known[at] = True
    if num_candidates == scores.shape[-1]:
        is_total_known.fill_(True)
    return torch.where(is_nucleus & is_total_known, num_inside, num_kept)


def _mass(scores: Tensor, best: Tensor) -> Tensor:
    """int64: probability relative to the best token's, in `_MASS_UNIT`s."""
    return (scores - best).exp_().mul_(_MASS_UNIT).to(torch.int64)


def _keep_lowest_ids(scores: Tensor, threshold: Tensor, num_kept: int) -> Tensor:
    """`scores` [vocab] with the best `num_kept` left, where several tie for the last places."""
    above = scores > threshold
    tied = (scores == threshold).nonzero().squeeze(-1)
    above[tied[: num_kept - int(above.sum())]] = True
    return scores.masked_fill(~above, _NEG_INF)
