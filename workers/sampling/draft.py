"""One drafting step: predicts the target's token, by the same chain on the draft's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.noise import NoiseStream
from outrider.workers.sampling.chain import adjust, process_rows
from outrider.workers.sampling.draw import SamplingOps, argmax, choose
from outrider.workers.sampling.filters import apply_filters
from outrider.workers.sampling.rows import LogitRow, LogitSpan, last_rows
from outrider.workers.sampling.sharded_argmax import Draw, sharded_argmax
from outrider.workers.sampling.verify import VerificationMode
from outrider.workers.sampling.vocab import VocabPart


class DraftSample(NamedTuple):
    """The draft tokens for the next position of each span."""

    tokens: Tensor  # int64 [n]
    # float32 [n]: the draft's confidence. Shared: q' of its token. Rejection: the largest q', since
    # trimming by the probability of the drawn token itself would bias the text.
    confidence: Tensor
    q: Tensor | None  # float32 [n, vocab] in rejection mode: what each token was sampled from


def draft_sample(
    logits: Tensor,
    spans: Sequence[LogitSpan],
    ops: SamplingOps,
    mode: VerificationMode,
    vocab: VocabPart | None = None,
) -> DraftSample:
    """Guess one token per span from `logits` [n, vocab], the last row of each.

    Shared mode uses the target's own noise, so it predicts the target's sample rather than its
    distribution. In rejection mode a greedy row's q is one-hot; where every row is greedy, q is
    None, which means the same. With `vocab`, `logits` are this rank's part of the rows.
    """
    is_plain = all(span.sampler.is_plain_greedy for span in spans)
    if vocab is not None and vocab.is_sharded and (is_plain or mode == "shared"):
        rows = last_rows(spans)
        return _guess_over_ranks(adjust(logits, rows), rows, Draw(ops, NoiseStream.SHARED, vocab))
    if is_plain:
        scores = logits.float() if vocab is None else vocab.gather(logits.float())
        tokens = argmax(scores)
        return DraftSample(tokens, ops.probability_of(scores, tokens), None)
    rows = last_rows(spans)
    scores = process_rows(logits, rows, vocab)
    if mode == "shared":
        tokens = choose(scores, rows, ops, NoiseStream.SHARED)
        return DraftSample(tokens, ops.probability_of(scores, tokens), None)
    tokens = choose(scores, rows, ops, NoiseStream.DRAFT)
    q = scores.softmax(-1)
    confidence = q.amax(-1)
    greedy = [row.slot for row in rows if row.sampler.is_greedy]
    if len(greedy) == len(rows):
        return DraftSample(tokens, confidence, None)
    if greedy:
        at = torch.tensor(greedy, device=q.device)
        q[at] = 0.0
        q[at, tokens[at]] = 1.0
    return DraftSample(tokens, confidence, q)


def _guess_over_ranks(scores: Tensor, rows: Sequence[LogitRow], draw: Draw) -> DraftSample:
    """Shared mode, from the ranks' parts of the scores before filters.

    Rows with filters are gathered: q' is relative to the mass they keep, which no rank knows.
    """
    winners = sharded_argmax(scores, rows, draw, statistic=scores.logsumexp(-1))
    tokens = winners.tokens
    confidence = (winners.scores - winners.statistics.logsumexp(0)).exp().float()
    filtered = [i for i, row in enumerate(rows) if row.sampler.has_filters]
    if filtered:
        at = torch.tensor(filtered, device=scores.device)
        own_rows = [rows[i] for i in filtered]
        kept = apply_filters(draw.vocab.gather(scores[at]), [row.sampler for row in own_rows])
        tokens[at] = choose(kept, own_rows, draw.ops, draw.stream)
        confidence[at] = draw.ops.probability_of(kept, tokens[at])
    return DraftSample(tokens, confidence, None)
