"""min_p, top_k and top_p inside kernels, without sorting the vocabulary.

Each of the three keeps a prefix of the tokens in order of (score, then lowest id). So the winner
without filters is tested: how many tokens, and how much probability mass, come before it. If it
fails, so does everything after it; the best of those before it, noise included, is tested next. The
token with the highest score always passes.

The best scores of the parts of the vocabulary give a bound below which no token matters. Usually
few are above it: each part lists its own, and only if a list overflows is the whole row searched.

The rule is that of `outrider.workers.sampling.filters`, to the last unit of mass: from equal logits
both keep the same tokens. Kernels that count mass are launched with `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.launch import let_next_start, wait_for_inputs
from outrider.kernels.gpu.noise import gumbel
from outrider.kernels.mass import (
    FLOAT32_BIAS,
    FLOAT32_MANTISSA_BITS,
    LEAST_POWER,
    LOG2_E,
    POWER_OF_TWO,
    UNIT_BITS,
)

LIST_SLOTS = 64
"""How many tokens a part of the vocabulary may list."""

_NEG_INF = tl.constexpr(float("-inf"))
_INF = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(LOG2_E)
_LEAST_POWER = tl.constexpr(LEAST_POWER)
_C0, _C1, _C2, _C3, _C4 = (tl.constexpr(factor) for factor in POWER_OF_TWO)
_EXPONENT_OF_UNIT = tl.constexpr(FLOAT32_BIAS + UNIT_BITS)
_MANTISSA_BITS = tl.constexpr(FLOAT32_MANTISSA_BITS)


@triton.jit
def scores_at(row_ptr, ids, is_token):
    """float32, -inf where there is no token.

    A NaN counts as -inf: it must not win, nor lead a search out of the vocabulary.
    """
    scores = tl.load(row_ptr + ids, mask=is_token, other=_NEG_INF).to(tl.float32)
    return tl.where(scores == scores, scores, _NEG_INF)


@triton.jit
def tempered_at(row_ptr, ids, is_token, temperature):
    """`scores_at` over temperature, as they are if that is 0."""
    divisor = tl.where(temperature > 0, temperature, 1.0)
    # A plain division is an approximation on GPUs.
    return tl.div_rn(scores_at(row_ptr, ids, is_token), divisor)


@triton.jit
def units_of(scores, highest):
    """int64: the mass of each score, as `outrider.kernels.mass.mass_in_units` counts it."""
    below = tl.where(scores > _NEG_INF, scores - highest, _NEG_INF)
    powers = tl.maximum(below * _LOG2_E, _LEAST_POWER)
    whole = tl.floor(powers + 0.5)
    fraction = powers - whole
    mass = fraction * _C4
    mass = (mass + _C3) * fraction
    mass = (mass + _C2) * fraction
    mass = (mass + _C1) * fraction
    mass = (mass + _C0) * fraction
    exponents = (whole.to(tl.int32) + _EXPONENT_OF_UNIT) << _MANTISSA_BITS
    return ((mass + 1.0) * exponents.to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def mass_of(scores):
    """The highest of some scores, and the sum of exp(score - highest)."""
    highest = tl.max(scores, axis=0)
    shift = tl.where(highest == _NEG_INF, 0.0, highest)
    return highest, tl.sum(tl.exp(scores - shift), axis=0)


@triton.jit
def highest_of_parts(highest_ptr, at, is_part):
    """The highest score of a row, and those of its parts."""
    of_parts = tl.load(highest_ptr + at, mask=is_part, other=_NEG_INF)
    return tl.max(of_parts, axis=0), of_parts


@triton.jit
def mass_of_parts(highest_ptr, mass_ptr, at, is_part):
    """`mass_of` a row, from that of its parts."""
    highest, of_parts = highest_of_parts(highest_ptr, at, is_part)
    shift = tl.where(highest == _NEG_INF, 0.0, highest)
    masses = tl.load(mass_ptr + at, mask=is_part, other=0.0)
    return highest, tl.sum(masses * tl.exp(of_parts - shift), axis=0)


@triton.jit
def winner_of_parts(noisy_ptr, winner_ptr, at, is_part):
    """The token with the best noisy score of a row, from the best of each part."""
    noisy = tl.load(noisy_ptr + at, mask=is_part, other=_NEG_INF)
    best, part = tl.max(noisy, axis=0, return_indices=True)
    winners = tl.load(winner_ptr + at, mask=is_part, other=0)
    is_best = tl.arange(0, noisy.shape[0]) == part
    return best, tl.sum(tl.where(is_best, winners, 0), axis=0)


@triton.jit
def load_filters(top_k_ptr, top_p_ptr, log_min_p_ptr, row, temperature, vocab):
    """top_k (0 where it leaves everything), top_p, log min_p, and whether any of them is on."""
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k < vocab, top_k, 0)
    top_p = tl.load(top_p_ptr + row)
    log_min_p = tl.load(log_min_p_ptr + row)
    has_filters = (top_k > 0) | (top_p < 1) | (log_min_p > _NEG_INF)
    return top_k, top_p, log_min_p, has_filters & (temperature > 0)


@triton.jit
def _score_reached_by(num_tokens, of_parts):
    """A score reached by at least `num_tokens` tokens, one per part. -inf if there are fewer
    parts."""
    is_last = tl.arange(0, of_parts.shape[0]) == num_tokens - 1
    ordered = tl.sort(of_parts, descending=True)
    return tl.max(tl.where(is_last, ordered, _NEG_INF), axis=0)


@triton.jit
def least_needed(of_parts, highest, of_winner, top_k, top_p, log_min_p):
    """Tokens below this score affect neither the test of the winner nor those after it."""
    needed = tl.maximum(of_winner, highest + log_min_p)
    if top_p < 1:
        # top_p also counts mass after the winner that min_p and top_k leave.
        if top_k > 0:
            needed = tl.maximum(_score_reached_by(top_k, of_parts), highest + log_min_p)
        elif log_min_p > _NEG_INF:
            needed = highest + log_min_p
    return needed


@triton.jit
def list_tokens_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr,
    noisy_ptr, winner_ptr, highest_ptr, list_ptr, count_ptr, units_ptr,
    stride, vocab, num_parts,
    PART: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each part of a row with filters lists its tokens that matter; empty slots hold `vocab`. It
    also counts the units of its mass, as the row's highest score is now known."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row >= 0:
        temperature = tl.load(temperature_ptr + row)
        top_k, top_p, log_min_p, has_filters = load_filters(
            top_k_ptr, top_p_ptr, log_min_p_ptr, row, temperature, vocab
        )
        if has_filters:
            row_ptr = logits_ptr + index.to(tl.int64) * stride
            parts = tl.arange(0, PARTS)
            at, is_part = index * num_parts + parts, parts < num_parts
            _, winner = winner_of_parts(noisy_ptr, winner_ptr, at, is_part)
            highest, of_parts = highest_of_parts(highest_ptr, at, is_part)
            of_winner = tempered_at(row_ptr, winner, True, temperature)
            needed = least_needed(of_parts, highest, of_winner, top_k, top_p, log_min_p)

            ids = part * PART + tl.arange(0, PART)
            scores = tempered_at(row_ptr, ids, ids < vocab, temperature)
            matters = (scores >= needed) & (scores > _NEG_INF)
            place = tl.cumsum(matters.to(tl.int32), axis=0) - 1
            count = tl.sum(matters.to(tl.int32), axis=0)
            own = index * num_parts + part
            own_list = list_ptr + own * SLOTS
            tl.store(own_list + place, ids, mask=matters & (place < SLOTS))
            slots = tl.arange(0, SLOTS)
            tl.store(own_list + slots, tl.zeros((SLOTS,), tl.int32) + vocab, mask=slots >= count)
            tl.store(count_ptr + own, count)
            tl.store(units_ptr + own, tl.sum(units_of(scores, highest), axis=0))


@triton.jit
def _token_block(
    row_ptr, list_ptr, is_listed, length, start, vocab, temperature, BLOCK: tl.constexpr
):
    """Ids and scores of the next tokens of the lists, or of the row if a list overflowed."""
    ids = start + tl.arange(0, BLOCK)
    if is_listed:
        ids = tl.load(list_ptr + ids, mask=ids < length, other=vocab)
    return ids, tempered_at(row_ptr, ids, ids < vocab, temperature)


@triton.jit
def _to_order(score):
    """int32 in the order of the floats."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_order(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _score_of_last(
    row_ptr, list_ptr, is_listed, length, vocab, temperature, highest, reached, top_k,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The score of the last token that top_k leaves, or one between that and the next token's."""
    low, high = _to_order(reached), _to_order(highest)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and no sum to overflow
        edge = _from_order(middle)
        count = 0
        for start in range(0, length, BLOCK):
            _, scores = _token_block(
                row_ptr, list_ptr, is_listed, length, start, vocab, temperature, BLOCK
            )
            count += tl.sum((scores >= edge).to(tl.int32), axis=0)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count > top_k, high, middle - 1)  # below `low` where the count is right
    return _from_order(low)


@triton.jit
def _units_left(
    row_ptr, list_ptr, is_listed, length, vocab, temperature, highest, least, edge, top_k,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The units of the tokens that min_p (`least`) and top_k (`edge`) leave."""
    num_above, units = 0, tl.zeros((), tl.int64)
    for start in range(0, length, BLOCK):
        _, scores = _token_block(
            row_ptr, list_ptr, is_listed, length, start, vocab, temperature, BLOCK
        )
        is_above = scores > edge
        num_above += tl.sum(is_above.to(tl.int32), axis=0)
        is_left = is_above & (scores >= least)
        units += tl.sum(tl.where(is_left, units_of(scores, highest), 0), axis=0)
    num_at_edge = tl.where((top_k > 0) & (edge >= least), top_k - num_above, 0)
    return units + num_at_edge.to(tl.int64) * units_of(edge, highest)


@triton.jit
def _best_before(
    row_ptr, list_ptr, is_listed, length, vocab, temperature, highest, winner, of_winner, state,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The number of tokens before the winner, their units, and the best of them with its noise."""
    num_before, units_before = 0, tl.zeros((), tl.int64)
    best, best_id = _NEG_INF, 0
    for start in range(0, length, BLOCK):
        ids, scores = _token_block(
            row_ptr, list_ptr, is_listed, length, start, vocab, temperature, BLOCK
        )
        is_before = (scores > of_winner) | ((scores == of_winner) & (ids < winner))
        count = tl.sum(is_before.to(tl.int32), axis=0)
        if count > 0:  # true for few blocks of a whole row, and noise is expensive
            num_before += count
            units_before += tl.sum(tl.where(is_before, units_of(scores, highest), 0), axis=0)
            noisy = tl.where(is_before, scores + gumbel(state, ids), _NEG_INF)
            block_best = tl.max(noisy, axis=0)
            block_id = tl.min(tl.where(noisy == block_best, ids, vocab), axis=0)
            best_id = tl.where(block_best > best, block_id, best_id)
            best = tl.maximum(best, block_best)
    return num_before, units_before, best_id


@triton.jit
def choose_filtered(
    row_ptr, list_ptr, is_listed, length, vocab, temperature, state,
    winner, highest, units, of_parts, top_k, top_p, log_min_p,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The token that a row's filters leave, starting from the winner without them; `highest` and
    `units` are those of the whole row."""
    least = highest + log_min_p
    enough = tl.full((), _INF, tl.float64)
    if top_p < 1:
        if (top_k > 0) | (log_min_p > _NEG_INF):
            edge = tl.full((), _NEG_INF, tl.float32)
            if top_k > 0:
                edge = _score_of_last(
                    row_ptr, list_ptr, is_listed, length, vocab, temperature, highest,
                    _score_reached_by(top_k, of_parts), top_k, BLOCK,
                )  # fmt: skip
            units = _units_left(
                row_ptr, list_ptr, is_listed, length, vocab, temperature, highest, least, edge,
                top_k, BLOCK,
            )  # fmt: skip
        enough = units.to(tl.float64) * top_p
    of_winner = tempered_at(row_ptr, winner, True, temperature)
    most_before = tl.where(top_k > 0, top_k, vocab)
    is_open = 1
    while is_open > 0:
        num_before, units_before, next_winner = _best_before(
            row_ptr, list_ptr, is_listed, length, vocab, temperature, highest, winner, of_winner,
            state, BLOCK,
        )  # fmt: skip
        passes = (of_winner >= least) & (num_before < most_before)
        passes = passes & (units_before.to(tl.float64) < enough)
        passes = passes | (num_before == 0)
        is_open = tl.where(passes, 0, 1)
        winner = tl.where(passes, winner, next_winner)
        of_winner = tempered_at(row_ptr, winner, True, temperature)
    return winner
