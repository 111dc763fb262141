"""Choosing a token per logit row, on whole rows or over the ranks that hold parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.noise import NoiseStream
from outrider.workers.sampling.chain import adjust, process_rows
from outrider.workers.sampling.draw import (
    SamplingOps,
    argmax,
    checked,
    choose,
    unless_finite,
)
from outrider.workers.sampling.rows import LogitRow, LogitSpan, logit_rows
from outrider.workers.sampling.sharded_argmax import Draw, sharded_argmax
from outrider.workers.sampling.sharded_filters import choose_filtered
from outrider.workers.sampling.vocab import VocabPart


def sample(
    logits: Tensor,
    spans: Sequence[LogitSpan],
    ops: SamplingOps,
    stream: NoiseStream = NoiseStream.SHARED,
    vocab: VocabPart | None = None,
) -> Tensor:
    """int64 [N]: the token each logit row chooses; ties go to the lowest id.

    The choice is a function of the row's logits, text, parameters, seed and position alone, so it
    is the same whether the position was reached token by token or by draft tokens. `logits` are
    whole rows, or this rank's part of them if `vocab` is given; then every rank gets the choice
    that whole rows give. With NaN or infinite scores it is `NO_TOKEN`.
    """
    if vocab is not None and vocab.is_sharded:
        rows = logit_rows(spans)
        return _choose_over_ranks(adjust(logits, rows), rows, Draw(ops, stream, vocab))
    if all(span.sampler.is_plain_greedy for span in spans):
        whole = logits if vocab is None else vocab.gather(logits)
        return checked(argmax(whole), whole)
    rows = logit_rows(spans)
    scores = process_rows(logits, rows, vocab)
    return checked(choose(scores, rows, ops, stream), scores)


def _choose_over_ranks(scores: Tensor, rows: Sequence[LogitRow], draw: Draw) -> Tensor:
    filtered = [i for i, row in enumerate(rows) if row.sampler.has_filters]
    if not filtered:
        winners = sharded_argmax(scores, rows, draw)
        return unless_finite(winners.tokens, winners.scores)
    winners = sharded_argmax(scores, rows, draw, statistic=scores.amax(-1))
    at = torch.tensor(filtered, device=scores.device)
    own_rows = [rows[i] for i in filtered]
    tokens = winners.tokens.clone()
    tokens[at] = choose_filtered(scores[at], own_rows, draw, winners.take(at))
    return unless_finite(tokens, winners.scores)
