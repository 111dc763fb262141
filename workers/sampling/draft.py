"""One drafting step: a guess of the target's token, by the same chain on the draft's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.noise import Stream
from outrider.workers.sampling.chain import process_rows
from outrider.workers.sampling.choose import SamplingOps, argmax, choose
from outrider.workers.sampling.rows import Span, last_rows
from outrider.workers.sampling.verify import VerificationMode


class DraftStep(NamedTuple):
    """What the draft proposes for the next position of each span."""

    tokens: Tensor  # int64 [n]
    # float32 [n]: how sure the draft is. Shared: q' of its token. Rejection: the largest q', since
    # trimming by the probability of the very token that was drawn would bias the text.
    confidence: Tensor
    q: Tensor | None  # float32 [n, vocab] in rejection mode: what each token was sampled from


def draft_sample(
    logits: Tensor, spans: Sequence[Span], ops: SamplingOps, mode: VerificationMode
) -> DraftStep:
    """Guess one token per span from `logits` [n, vocab], the last row of each.

    Shared mode uses the target's own noise, so it guesses the target's sample rather than its
    distribution. In rejection mode a greedy row's q is one-hot; where every row is greedy, q is
    left out, which means the same.
    """
    if all(span.sampler.is_plain_greedy for span in spans):
        tokens = argmax(logits)
        return DraftStep(tokens, ops.probability_of(logits.float(), tokens), None)
    rows = last_rows(spans)
    scores = process_rows(logits, rows)
    if mode == "shared":
        tokens = choose(scores, rows, ops, Stream.SHARED)
        return DraftStep(tokens, ops.probability_of(scores, tokens), None)
    tokens = choose(scores, rows, ops, Stream.DRAFT)
    q = scores.softmax(-1)
    confidence = q.amax(-1)
    greedy = [row.slot for row in rows if row.sampler.is_greedy]
    if len(greedy) == len(rows):
        return DraftStep(tokens, confidence, None)
    if greedy:
        at = torch.tensor(greedy, device=q.device)
        q[at] = 0.0
        q[at, tokens[at]] = 1.0
    return DraftStep(tokens, confidence, q)
