"""From raw logits to the scores a token is chosen by: every sampling parameter, in fixed order.

Bias, penalties, bans; temperature; min_p, top_k, top_p. A row's scores depend, bit for bit, on its
logits and text alone: each step is elementwise, or sums integers, so neither the rest of the batch
nor the way a position was reached matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.workers.sampling.filters import apply_filters
from outrider.workers.sampling.rows import LogitRow, LogitSpan, logit_rows
from outrider.workers.sampling.vocab import VocabPart

_NEG_INF = float("-inf")


def process(logits: Tensor, spans: Sequence[LogitSpan]) -> Tensor:
    """float32 scores [N, vocab]: unnormalised log p', -inf where a token is ruled out.

    `logits` [N, vocab] holds the rows of all spans in order and is never modified; if no row has
    options it is returned as it is.
    """
    return process_rows(logits, logit_rows(spans))


def process_rows(
    logits: Tensor, rows: Sequence[LogitRow], vocab: VocabPart | None = None
) -> Tensor:
    """`process` for any choice of rows; `rows[i].slot` is i.

    With `vocab`, `logits` are this rank's part of the rows; the scores are still whole rows.
    """
    scores = adjust(logits, rows)
    if vocab is not None:
        scores = vocab.gather(scores)
    filtered = [row for row in rows if row.sampler.has_filters]
    if not filtered:
        return scores
    if len(filtered) == len(rows):
        return apply_filters(scores, [row.sampler for row in filtered])
    indices = torch.tensor([row.slot for row in filtered], device=scores.device)
    kept = apply_filters(scores.index_select(0, indices), [row.sampler for row in filtered])
    return scores.index_copy(0, indices, kept)


def adjust(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """The scores before filters, of the tokens whose ids the rows' samplers hold.

    Each depends on its own logit alone, so a rank needs nothing from the others.
    """
    biased = [row for row in rows if row.sampler.has_bias]
    penalised = [row for row in rows if row.sampler.has_penalties]
    restricted = [row for row in rows if row.sampler.has_allowed]
    banned = [row for row in rows if row.sampler.has_bans]
    tempered = any(row.sampler.temperature != 1.0 for row in rows)
    changes = bool(biased or penalised or restricted or banned)
    # The steps up to the bans work in place on one flat copy.
    scores = logits.to(torch.float32, copy=changes, memory_format=torch.contiguous_format)
    if biased:
        _add_bias(scores, biased)
    if penalised:
        _penalise(scores, penalised)
    if restricted:
        _restrict(scores, restricted)
    if banned:
        _ban(scores, banned)
    if tempered:
        # Rows without a temperature are divided by 1, which is exact.
        temperatures = [row.sampler.temperature for row in rows]
        scores = scores / _column(temperatures, torch.float32, scores.device)
    return scores


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)


def _flat_keys(scores: Tensor, rows: Sequence[LogitRow], columns: Sequence[Tensor]) -> Tensor:
    """Places in the flattened scores of each row's `columns`, concatenated."""
    starts = np.array([row.slot for row in rows], dtype=np.int64) * scores.shape[-1]
    offsets = starts.repeat([len(own) for own in columns])
    return torch.cat(tuple(columns)) + torch.from_numpy(offsets).to(scores.device)


def _add_bias(scores: Tensor, rows: Sequence[LogitRow]) -> None:
    keys = _flat_keys(scores, rows, [row.sampler.bias[0] for row in rows])
    values = torch.cat([row.sampler.bias[1] for row in rows])
    scores.view(-1).index_add_(0, keys, values)


def _restrict(scores: Tensor, rows: Sequence[LogitRow]) -> None:
    flat = scores.view(-1)
    keys = _flat_keys(scores, rows, [row.sampler.allowed for row in rows])
    allowed = flat[keys]
    scores[torch.tensor([row.slot for row in rows], device=scores.device)] = _NEG_INF
    flat[keys] = allowed


def _penalise(scores: Tensor, rows: Sequence[LogitRow]) -> None:
    """Repetition over prompt and output, then frequency and presence over output.

    Works on the tokens that occur, once per occurrence: a token that occurs twice gets the same
    value twice, so duplicates are harmless.
    """
    device = scores.device
    keys, occurred, ordinals = _occurrences(rows)
    params = [row.sampler.params for row in rows]
    settings = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params],
        dtype=np.float32,
    )[ordinals]
    repetition, frequency, presence = torch.from_numpy(settings).to(device).unbind(-1)
    at = torch.from_numpy(keys).to(device)
    counts = torch.from_numpy(occurred).to(device, torch.float32)
    flat = scores.view(-1)
    values = flat[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - counts * frequency
    values = values - (counts > 0) * presence
    flat.scatter_(0, at, values)


def _occurrences(
    rows: Sequence[LogitRow],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For every token of every row's text: its place in the flat scores, how often it is output,
    and which of `rows` it belongs to.

    Rows of one span are consecutive and each sees more than the one before.
    """
    seen, occurred = [], []
    span, num_counted = None, 0
    for row in rows:
        prompt_len = row.sampler.prompt_len
        if row.span is not span:
            span, text, num_counted = row.span, row.span.text(), prompt_len
            counts = np.zeros(int(text.max(initial=0)) + 1, dtype=np.int64)
        np.add.at(counts, text[num_counted : row.position], 1)
        num_counted = row.position
        start = 0 if row.sampler.params.repetition_penalty != 1.0 else prompt_len
        seen.append(text[start : row.position])
        occurred.append(counts[seen[-1]])
    token_ids = np.concatenate(seen)
    ordinals = np.arange(len(rows), dtype=np.int64).repeat([len(part) for part in seen])
    slots = np.array([row.slot for row in rows], dtype=np.int64)[ordinals]
    # Other ranks hold the other ids, and a draft's vocabulary may lack some of the text.
    held = rows[0].sampler.held
    is_held = (token_ids >= held.start) & (token_ids < held.stop)
    keys = slots * len(held) + token_ids - held.start
    return keys[is_held], np.concatenate(occurred)[is_held], ordinals[is_held]


def _ban(scores: Tensor, rows: Sequence[LogitRow]) -> None:
    held = rows[0].sampler.held
    keys = [
        row.slot * len(held) + token - held.start
        for row in rows
        for token in row.sampler.banned_ids(row.span, row.num_drafts)
        if token in held
    ]
    if keys:
        scores.view(-1).index_fill_(0, torch.tensor(keys, device=scores.device), _NEG_INF)
