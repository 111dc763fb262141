"""Log-probabilities of the raw model distribution, for requests with `logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.scheduler.types import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int | Sequence[int]
) -> list[TokenLogprobs]:
    """Log-softmax of `logits` [N, vocab] at one token per row, its rank, and the row's best.

    `num_top` is how many of the best to list, for all rows or for each. Ties are ranked by id, so
    rank 1 is always the greedy token.
    """
    if not token_ids:
        return []
    counts = [num_top] * len(token_ids) if isinstance(num_top, int) else list(num_top)
    scores = logits.float()
    logprobs = scores.log_softmax(-1)
    tokens = torch.tensor(token_ids, device=scores.device).unsqueeze(-1)
    own = scores.gather(-1, tokens)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    ranks = (scores > own).sum(-1) + ((scores == own) & (ids < tokens)).sum(-1) + 1
    chosen = logprobs.gather(-1, tokens).squeeze(-1).tolist()
    tops = _best(scores, logprobs, max(counts))
    return [
        TokenLogprobs(token, logprob, rank, top[:count])
        for token, logprob, rank, top, count in zip(
            token_ids, chosen, ranks.tolist(), tops, counts, strict=True
        )
    ]


def _best(scores: Tensor, logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Per row the best `count` (id, logprob), best first, ties by id."""
    if count == 0:
        return [()] * scores.shape[0]
    width = min(count, scores.shape[-1])
    # One more than requested shows ties across the end, where topk may pick any.
    values, ids = scores.topk(min(width + 1, scores.shape[-1]))
    if bool((values[:, 1:] == values[:, :-1]).any()):
        ids = scores.sort(stable=True, dim=-1, descending=True).indices
    ids = ids[:, :width]
    best = logprobs.gather(-1, ids)
    return [
        tuple(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids.tolist(), best.tolist(), strict=True)
    ]
