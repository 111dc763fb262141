"""Samples a token from each row of scores by the argmax over score plus noise.

The vocabulary of a row is split into parts, one program each; one program per row combines them.
Parts are fixed ranges of ids: no row's result depends on the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.filters import (
    LIST_SLOTS,
    choose_filtered,
    highest_of_parts,
    list_tokens_kernel,
    load_filters,
    mass_of,
    mass_of_parts,
    scores_at,
    tempered_at,
    winner_of_parts,
)
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)
from outrider.kernels.gpu.noise import gumbel, row_state
from outrider.kernels.noise import NoiseStream
from outrider.kernels.seeds import signed64

_PART_TOKENS = 2048
_PART_WARPS = 8
_SEARCH_BLOCK = 4096
_SEARCH_WARPS = 8
_SHARED_STREAM = tl.constexpr(int(NoiseStream.SHARED))
_NEG_INF = tl.constexpr(float("-inf"))


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Sampling parameters of each row, on the device; see `set_row`."""

    temperature: Tensor  # float32 [num_rows]
    seed: Tensor  # int64 [num_rows]
    top_k: Tensor  # int32 [num_rows]
    top_p: Tensor  # float64 [num_rows], as the host compares it
    log_min_p: Tensor  # float32 [num_rows]

    @classmethod
    def create(cls, num_rows: int, device: torch.device) -> SamplingTable:
        """A table whose rows are all greedy."""
        return cls(
            temperature=torch.zeros(num_rows, dtype=torch.float32, device=device),
            seed=torch.zeros(num_rows, dtype=torch.int64, device=device),
            top_k=torch.zeros(num_rows, dtype=torch.int32, device=device),
            top_p=torch.ones(num_rows, dtype=torch.float64, device=device),
            log_min_p=torch.full((num_rows,), -math.inf, dtype=torch.float32, device=device),
        )

    def set_row(
        self,
        row: int,
        temperature: float,
        seed: int,
        top_k: int = 0,
        top_p: float = 1.0,
        log_min_p: float = -math.inf,
    ) -> None:
        """Temperature 0 is greedy; the defaults of the filters are off."""
        self.temperature[row] = temperature
        self.seed[row] = signed64(seed)
        self.top_k[row] = top_k
        self.top_p[row] = top_p
        self.log_min_p[row] = log_min_p


def gumbel_argmax(scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """See `outrider.kernels.types.Ops`."""
    return gumbel_max(scores, seeds, streams, positions, 0)[1]


def gumbel_max(
    scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor, first_id: int
) -> tuple[Tensor, Tensor]:
    """See `outrider.kernels.types.Ops`."""
    scores = _with_dense_rows(scores)
    num_rows, vocab = scores.shape
    best = scores.new_empty(num_rows, dtype=torch.float32)
    columns = scores.new_empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return best, columns
    parts = _PartResults.empty(scores)
    pdl = pdl_enabled(scores.device)
    _noisy_parts_kernel[(num_rows, parts.count)](
        scores, seeds.contiguous(), streams.contiguous(), positions.contiguous(),
        parts.noisy, parts.winner, scores.stride(0), vocab, first_id,
        PART=_PART_TOKENS, PDL=pdl, num_warps=_PART_WARPS, **_options(pdl),
    )  # fmt: skip
    _best_part_kernel[(num_rows,)](
        parts.noisy, parts.winner, best, columns, parts.count,
        PARTS=parts.padded_count, PDL=pdl, **_options(pdl),
    )  # fmt: skip
    return best, columns


def probability_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """See `outrider.kernels.types.Ops`."""
    scores = _with_dense_rows(scores)
    num_rows, vocab = scores.shape
    out = scores.new_empty(num_rows, dtype=torch.float32)
    if num_rows == 0:
        return out
    parts = _PartResults.empty(scores)
    pdl = pdl_enabled(scores.device)
    _mass_parts_kernel[(num_rows, parts.count)](
        scores, parts.highest, parts.mass, scores.stride(0), vocab,
        PART=_PART_TOKENS, PDL=pdl, num_warps=_PART_WARPS, **_options(pdl),
    )  # fmt: skip
    _probability_kernel[(num_rows,)](
        scores, tokens.contiguous(), parts.highest, parts.mass, out, scores.stride(0), parts.count,
        PARTS=parts.padded_count, PDL=pdl, **_options(pdl),
    )  # fmt: skip
    return out


def choose_tokens(
    logits: Tensor,
    settings: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    out_tokens: Tensor,
    out_confidences: Tensor | None = None,
    by_row: bool = False,
) -> None:
    """Each row's choice, as `outrider.workers.sampling.choose.sample` makes it.

    `logits` [R, vocab] may be the first columns of wider rows. `rows` int32 [R] is the row of
    `settings` of each; where it is negative, the token is -1 and no confidence is written.
    `positions` int32 [R] are those of the tokens to be chosen. Any integer type will do for the
    tokens; with `by_row` each is written at the place of its row of `settings`, and none for
    padding. Without it, the token is also -1 where none can be chosen, as scores are NaN or
    infinite.

    The confidences, float32 and at the places of the tokens, estimate that a similar model with the
    same noise chooses the same token: the logistic function of its margin over all others, noise
    included (of the logits at temperature 0). Filtered tokens count as well, which can only lower
    it; where the best of all is filtered, the confidence is 1/2.
    """
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    parts = _PartResults.empty(logits)
    lists = logits.new_empty(num_rows, parts.count * LIST_SLOTS, dtype=torch.int32)
    counts = logits.new_empty(num_rows, parts.count, dtype=torch.int32)
    units = logits.new_empty(num_rows, parts.count, dtype=torch.int64)
    filters = (settings.top_k, settings.top_p, settings.log_min_p)
    found = (parts.noisy, parts.winner, parts.highest)
    has_confidence = out_confidences is not None
    pdl = pdl_enabled(logits.device)
    _contest_kernel[(num_rows, parts.count)](
        logits, rows, positions, settings.temperature, settings.seed, *found, parts.second,
        logits.stride(0), vocab,
        PART=_PART_TOKENS, HAS_CONFIDENCE=has_confidence, PDL=pdl, num_warps=_PART_WARPS,
        **_options(pdl),
    )  # fmt: skip
    list_tokens_kernel[(num_rows, parts.count)](
        logits, rows, settings.temperature, *filters, *found, lists, counts, units,
        logits.stride(0), vocab, parts.count,
        PART=_PART_TOKENS, PARTS=parts.padded_count, SLOTS=LIST_SLOTS, PDL=pdl,
        num_warps=_PART_WARPS, **_options(pdl),
    )  # fmt: skip
    _settle_kernel[(num_rows,)](
        logits, rows, positions, settings.temperature, settings.seed, *filters, *found,
        parts.second, lists, counts, units, out_tokens, out_confidences,
        logits.stride(0), vocab, parts.count, out_tokens.stride(0),
        0 if out_confidences is None else out_confidences.stride(0), BY_ROW=by_row,
        PARTS=parts.padded_count, SLOTS=LIST_SLOTS, BLOCK=_SEARCH_BLOCK,
        HAS_CONFIDENCE=has_confidence, PDL=pdl, num_warps=_SEARCH_WARPS, **_options(pdl),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _PartResults:
    """Partial results of each part of each row, all [R, count]."""

    noisy: Tensor  # float32, the best score with its noise
    winner: Tensor  # int32, its token
    second: Tensor  # float32, the best score with its noise except the winner's
    highest: Tensor  # float32, the best score without noise
    mass: Tensor  # float32, the sum of exp(score - highest)

    @classmethod
    def empty(cls, scores: Tensor) -> _PartResults:
        shape = (scores.shape[0], -(-scores.shape[1] // _PART_TOKENS))
        floats = scores.new_empty(4, *shape, dtype=torch.float32)
        return cls(floats[0], scores.new_empty(shape, dtype=torch.int32), *floats[1:])

    @property
    def count(self) -> int:
        return self.noisy.shape[1]

    @property
    def padded_count(self) -> int:
        """Blocks of a kernel are powers of two."""
        return max(2, 1 << (self.count - 1).bit_length())


def _options(pdl: bool) -> dict[str, Any]:
    # Every kernel must compute the same noise for a token, and the same mass as the host.
    return {"enable_fp_fusion": False, **launch_options(pdl)}


def _with_dense_rows(scores: Tensor) -> Tensor:
    return scores if scores.stride(-1) == 1 else scores.contiguous()


@triton.jit
def _best_in_part(noisy, part, PART: tl.constexpr):
    best, place = tl.max(noisy, axis=0, return_indices=True)
    return best, part * PART + place


@triton.jit
def _noisy_parts_kernel(
    scores_ptr, seeds_ptr, streams_ptr, positions_ptr, noisy_ptr, winner_ptr,
    stride, vocab, first_id,
    PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    scores = scores_at(scores_ptr + row.to(tl.int64) * stride, columns, columns < vocab)
    state = row_state(
        tl.load(seeds_ptr + row), tl.load(streams_ptr + row), tl.load(positions_ptr + row)
    )
    best, column = _best_in_part(scores + gumbel(state, first_id + columns), part, PART)
    at = row * tl.num_programs(1) + part
    tl.store(noisy_ptr + at, best)
    tl.store(winner_ptr + at, column)


@triton.jit
def _best_part_kernel(
    noisy_ptr, winner_ptr, best_ptr, column_ptr, num_parts, PARTS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    best, winner = winner_of_parts(
        noisy_ptr, winner_ptr, row * num_parts + parts, parts < num_parts
    )
    tl.store(best_ptr + row, best)
    tl.store(column_ptr + row, winner)


@triton.jit
def _mass_parts_kernel(
    scores_ptr, highest_ptr, mass_ptr, stride, vocab, PART: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    scores = scores_at(scores_ptr + row.to(tl.int64) * stride, columns, columns < vocab)
    highest, mass = mass_of(scores)
    at = row * tl.num_programs(1) + part
    tl.store(highest_ptr + at, highest)
    tl.store(mass_ptr + at, mass)


@triton.jit
def _probability_kernel(
    scores_ptr, tokens_ptr, highest_ptr, mass_ptr, out_ptr,
    stride, num_parts,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    highest, mass = mass_of_parts(highest_ptr, mass_ptr, row * num_parts + parts, parts < num_parts)
    row_ptr = scores_ptr + row.to(tl.int64) * stride
    score = scores_at(row_ptr, tl.load(tokens_ptr + row), True)
    tl.store(out_ptr + row, tl.exp(score - highest) / mass)


@triton.jit
def _contest_kernel(
    logits_ptr, rows_ptr, positions_ptr, temperature_ptr, seed_ptr,
    noisy_ptr, winner_ptr, highest_ptr, second_ptr,
    stride, vocab,
    PART: tl.constexpr, HAS_CONFIDENCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best token of each part, noise included, before filters; and the highest score."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row >= 0:
        temperature = tl.load(temperature_ptr + row)
        ids = part * PART + tl.arange(0, PART)
        row_ptr = logits_ptr + index.to(tl.int64) * stride
        scores = tempered_at(row_ptr, ids, ids < vocab, temperature)
        noisy = scores
        if temperature > 0:
            position = tl.load(positions_ptr + index)
            noisy += gumbel(row_state(tl.load(seed_ptr + row), _SHARED_STREAM, position), ids)
        best, winner = _best_in_part(noisy, part, PART)
        at = index * tl.num_programs(1) + part
        tl.store(noisy_ptr + at, best)
        tl.store(winner_ptr + at, winner)
        tl.store(highest_ptr + at, tl.max(scores, axis=0))
        if HAS_CONFIDENCE:
            tl.store(second_ptr + at, tl.max(tl.where(ids == winner, _NEG_INF, noisy), axis=0))


@triton.jit
def _margin_of_parts(noisy_ptr, second_ptr, at, is_part):
    """By how much the best noisy score of a row beats all others."""
    noisy = tl.load(noisy_ptr + at, mask=is_part, other=_NEG_INF)
    best, part = tl.max(noisy, axis=0, return_indices=True)
    seconds = tl.load(second_ptr + at, mask=is_part, other=_NEG_INF)
    others = tl.where(tl.arange(0, noisy.shape[0]) == part, seconds, noisy)
    return best - tl.max(others, axis=0)


@triton.jit
def _settle_kernel(
    logits_ptr, rows_ptr, positions_ptr, temperature_ptr, seed_ptr,
    top_k_ptr, top_p_ptr, log_min_p_ptr,
    noisy_ptr, winner_ptr, highest_ptr, second_ptr, list_ptr, count_ptr, units_ptr,
    token_ptr, confidence_ptr,
    stride, vocab, num_parts, token_stride, confidence_stride,
    BY_ROW: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row: the winner of the parts, or of what filters leave."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    if row < 0:
        if not BY_ROW:
            tl.store(token_ptr + index * token_stride, -1)
    else:
        temperature = tl.load(temperature_ptr + row)
        row_ptr = logits_ptr + index.to(tl.int64) * stride
        parts = tl.arange(0, PARTS)
        at, is_part = index * num_parts + parts, parts < num_parts
        _, best = winner_of_parts(noisy_ptr, winner_ptr, at, is_part)
        winner = best
        highest, of_parts = highest_of_parts(highest_ptr, at, is_part)
        top_k, top_p, log_min_p, has_filters = load_filters(
            top_k_ptr, top_p_ptr, log_min_p_ptr, row, temperature, vocab
        )
        if has_filters:
            longest = tl.max(tl.load(count_ptr + at, mask=is_part, other=0), axis=0)
            is_listed = longest <= SLOTS
            units = tl.sum(tl.load(units_ptr + at, mask=is_part, other=0), axis=0)
            state = row_state(
                tl.load(seed_ptr + row), _SHARED_STREAM, tl.load(positions_ptr + index)
            )
            winner = choose_filtered(
                row_ptr, list_ptr + index * num_parts * SLOTS, is_listed,
                tl.where(is_listed, num_parts * SLOTS, vocab), vocab, temperature, state,
                winner, highest, units, of_parts, top_k, top_p, log_min_p, BLOCK,
            )  # fmt: skip
        if not BY_ROW:
            # Comparisons with NaN are false, and scores that are all NaN have no highest.
            winner = tl.where((highest > _NEG_INF) & (highest < -_NEG_INF), winner, -1)
        place = (row if BY_ROW else index).to(tl.int64)
        tl.store(token_ptr + place * token_stride, winner)
        if HAS_CONFIDENCE:
            margin = _margin_of_parts(noisy_ptr, second_ptr, at, is_part)
            is_ahead = (winner == best) & (margin > 0)
            chance = tl.where(is_ahead, tl.sigmoid(margin), 0.5)
            tl.store(confidence_ptr + place * confidence_stride, chance)
