"""The policy that maximizes committed tokens per second, decided before drafting.

A draft token is a pair (row, position j). Its survival, the probability that it and all before it
are accepted, never rises with j, so the drafts chosen are a prefix per row. For each batch depth
and each size of the target's pass, the likeliest drafts are taken until the pass is full. Their
expected tokens, over the time to draft and verify them, are compared with all other candidates and
with plain decoding. Another draft pass costs the same for one row or for many, so a greedy choice
draft by draft would misjudge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log2
from typing import NamedTuple

from outrider.scheduler.depths import Candidate, DepthChoice, DepthSnapshot, cut_evenly

# Hysteresis: a change from the last step must gain this factor, so that depths do not flap and no
# risk is taken for nothing.
_STAY = 1.01
_SPECULATE = 1.02
_SPECULATE_BY_LOOKUP = 1.05  # lookup often finds nothing; require a clear gain
_SPECULATE_SURELY = 0.98  # drafting that may stop early gains more than estimated
_PAYS_WITHIN = 32  # steps in which catching up has to pay
_RISK = 0.05  # extra gain required if no row drafts yet
_MAX_LEAST_SURVIVAL = 0.9  # a draft this likely is always made, whatever the cost estimates
_MAX_STEPS = 6  # of a row's weight from the mean, up or down
_TURN = 64  # steps for which the same rows draft, if only some of equal rows fit


class _Offer(NamedTuple):
    """The drafts at one position of rows with equal estimates."""

    survival: float
    position: int
    kind: tuple[float, ...]  # the survivals these rows share
    num_rows: int


class _Base(NamedTuple):
    """What a step holds besides the drafts to be chosen."""

    rows: int  # decode rows
    tokens: int  # of the pass without the drafts to be chosen
    value: float  # their expected committed tokens
    fixed_counts: tuple[int, ...]  # by position: rows whose client fixed at least that depth
    room: int


def goodput(snapshot: DepthSnapshot) -> DepthChoice:
    if not snapshot.remaining:
        return _most_tokens(snapshot)
    weights = _weights(snapshot)
    weighted = [
        tuple(weight * survival for survival in kind)
        for weight, kind in zip(weights, snapshot.survivals, strict=True)
    ]
    # Selection goes by confidence, whatever the rows' weights.
    choice = _most_tokens(replace(snapshot, survivals=weighted, selection_gain=0.0))
    return replace(choice, chosen=_unweighted(choice, snapshot))


def _weights(snapshot: DepthSnapshot) -> list[float]:
    """How much a row's token is worth. Rows that end are not replaced, so the likeliest drafts are
    those of rows that end early and leave the others to run on alone. So a row's tokens count by
    the square of the rounds it may still need, in steps of the square root of two: few kinds of
    rows are quickly compared."""
    rounds = [
        remaining / (1 + sum(kind))
        for remaining, kind in zip(snapshot.remaining, snapshot.survivals, strict=True)
    ]
    mean = sum(rounds) / len(rounds)
    logs = [min(max(round(4 * log2(each / mean)), -_MAX_STEPS), _MAX_STEPS) for each in rounds]
    weights = [2 ** (each / 2) for each in logs]
    scale = len(weights) / sum(weights)
    return [scale * each for each in weights]


def _unweighted(choice: DepthChoice, snapshot: DepthSnapshot) -> Candidate | None:
    """The chosen candidate with the tokens it is expected to give."""
    if choice.chosen is None:
        return None
    drafted = zip(choice.depths, snapshot.survivals, strict=True)
    tokens = len(choice.depths) + sum(sum(kind[:depth]) for depth, kind in drafted)
    return choice.chosen._replace(tokens=tokens)


def _most_tokens(snapshot: DepthSnapshot) -> DepthChoice:
    offers, base = _offers(snapshot), _base(snapshot)
    if not offers or base.room <= 0:
        return _only_fixed(snapshot)
    candidates: Sequence[Candidate] = list(_candidates(snapshot, offers, base, base.rows))
    best = max(candidates, key=lambda each: _rate(each, snapshot))
    if best.num_drafts <= candidates[0].num_drafts:
        return _only_fixed(snapshot, candidates)
    depths = _depths(snapshot, offers, best)
    if not snapshot.previous_batch_depth and not _pays_soon(snapshot, candidates[0], best, depths):
        return _only_fixed(snapshot, candidates)
    batch_depth, least = best.batch_depth, 0.0
    if snapshot.num_prompt_tokens or not all(snapshot.ready):
        depths, best, candidates = _for_now(snapshot, base, depths, best.tokens_per_s)
    elif snapshot.can_stop:  # a draft's confidence tells more than averages do
        depths, least = snapshot.max_depths, _min_survival(snapshot, best)
    shown = sorted(candidates[1:], key=lambda each: -each.tokens_per_s)[:7]
    selected = best.num_verified if best.num_verified < best.num_drafts else None
    return DepthChoice(depths, selected, best, (candidates[0], *shown), batch_depth, least)


def _min_survival(snapshot: DepthSnapshot, best: Candidate) -> float:
    """The survival above which another draft gains more than it costs to make and to verify. The
    draft's own rejection is left out, as drafts are accepted more often than their confidence says.
    The cost of verifying one more is averaged over the depth: the difference of two neighbouring
    sizes is noise."""
    verify, deepest = snapshot.costs.verify, max(snapshot.max_depths)
    row_s = (verify.at(1 + deepest) - verify.at(1)) / deepest
    return min(best.tokens_per_s * (snapshot.costs.next_draft.at(1) + row_s), _MAX_LEAST_SURVIVAL)


def _pays_soon(
    snapshot: DepthSnapshot, plain: Candidate, best: Candidate, depths: Sequence[int]
) -> bool:
    """Whether starting to draft pays: rows that are behind have to catch up first, and may end, or
    turn out worse than estimated, soon after."""
    missing = num_behind = num_drafting = 0
    for behind, ready, depth in zip(snapshot.behind, snapshot.ready, depths, strict=True):
        if depth:
            num_drafting += 1
            if not ready:
                num_behind += 1
                missing += behind
    if not num_behind:
        return True
    catch_up_s = missing * snapshot.costs.prefill_s / _PAYS_WITHIN
    least = plain.tokens_per_s * (1 + _RISK * num_behind / num_drafting)
    return best.tokens >= least * (best.seconds + catch_up_s)


def _for_now(
    snapshot: DepthSnapshot, base: _Base, depths: Sequence[int], price: float
) -> tuple[Sequence[int], Candidate, Sequence[Candidate]]:
    """The choice for a transient step, with prompts or rows that catch up. The steady state sets
    the `price` of a second, in tokens; a draft is made if it gains more than its time costs."""
    ready = snapshot.ready
    # Prompts are a sunk cost; and a row that does not draft now loses the next step as well, to
    # catch up.
    snapshot = replace(snapshot, overhead_s=0.0)
    alone_s = snapshot.costs.verify.at(base.rows) + snapshot.context * snapshot.costs.context_s
    kept = max(price * alone_s / base.rows - 1.0, 0.0)
    offers = _offers(snapshot, ready, kept)
    if not offers:
        plain = _priced(snapshot, base, base.tokens, base.fixed_counts, 0, base.value)
        return depths, plain, (plain,)
    candidates = list(_candidates(snapshot, offers, base, base.tokens))
    best = max(candidates, key=lambda each: each.tokens - price * each.seconds)
    now = _depths(snapshot, offers, best, ready)
    best = best._replace(tokens=best.tokens - kept * sum(depth > 0 for depth in now))
    depths = [
        drafted if is_ready else later
        for is_ready, drafted, later in zip(ready, now, depths, strict=True)
    ]
    return depths, best, candidates


def _rate(candidate: Candidate, snapshot: DepthSnapshot) -> float:
    rate = candidate.tokens_per_s
    if not candidate.batch_depth:
        least = _SPECULATE_BY_LOOKUP if snapshot.only_looks_up else _SPECULATE
        rate *= _SPECULATE_SURELY if snapshot.can_stop else least
    return rate * _STAY if candidate.batch_depth == snapshot.previous_batch_depth else rate


def _offers(snapshot: DepthSnapshot, ready: Sequence[bool] = (), kept: float = 0.0) -> list[_Offer]:
    """All possible drafts, of rows that are `ready` or else of all: the likeliest first, and of
    one kind by position. `kept` is the extra value of a row's first draft."""
    survivals = snapshot.survivals
    if snapshot.is_fixed:
        free = zip(survivals, snapshot.is_fixed, strict=True)
        survivals = [() if is_fixed else kind for kind, is_fixed in free]
    if ready:
        survivals = [kind if each else () for kind, each in zip(survivals, ready, strict=True)]
    kinds = Counter(survivals)
    offers = [
        _Offer(survival + kept if position == 1 else survival, position, kind, count)
        for kind, count in kinds.items()
        for position, survival in enumerate(kind, 1)
    ]
    offers.sort(key=lambda offer: (-offer.survival, offer.position))
    return offers


def _base(snapshot: DepthSnapshot) -> _Base:
    rows = len(snapshot.max_depths)
    value, drafts = float(rows), 0
    fixed_counts: tuple[int, ...] = ()
    if any(snapshot.is_fixed):
        fixed = [
            kind for kind, fixed in zip(snapshot.survivals, snapshot.is_fixed, strict=True) if fixed
        ]
        value += sum(map(sum, fixed))
        deepest = max(map(len, fixed), default=0)
        fixed_counts = tuple(
            sum(len(kind) > position for kind in fixed) for position in range(deepest)
        )
        drafts = sum(fixed_counts)
    tokens = rows + drafts + snapshot.num_prompt_tokens
    return _Base(rows + drafts, tokens, value, fixed_counts, snapshot.room - drafts)


def _candidates(
    snapshot: DepthSnapshot, offers: Sequence[_Offer], base: _Base, tokens: int
) -> Iterator[Candidate]:
    """Plain decoding, then numbers of drafts for each batch depth; `tokens` are in the pass
    anyway."""
    yield _priced(snapshot, base, tokens, base.fixed_counts, 0, base.value)
    deepest = max(offer.position for offer in offers)
    sizes = _amounts(snapshot, tokens, base.room)
    for batch_depth in range(1, deepest + 1):
        yield from _of_depth(snapshot, offers, base, tokens, batch_depth, sizes)
        if snapshot.selection_gain:
            yield from _selected(snapshot, offers, base, tokens, batch_depth, sizes)


def _amounts(snapshot: DepthSnapshot, tokens: int, room: int) -> Sequence[int]:
    """Numbers of drafts that fill the pass to one of its sizes."""
    max_tokens = tokens + room
    return [size - tokens for size in snapshot.costs.verify.sizes if tokens < size < max_tokens] + [
        room
    ]


def _of_depth(
    snapshot: DepthSnapshot,
    offers: Sequence[_Offer],
    base: _Base,
    tokens: int,
    batch_depth: int,
    sizes: Sequence[int],
) -> Iterator[Candidate]:
    counts = [*base.fixed_counts, *([0] * (batch_depth - len(base.fixed_counts)))]
    value, bought, sizes_left = base.value, 0, iter(sizes)
    size = next(sizes_left)
    num_deepest = 0  # drafts at `batch_depth`; without one this repeats a lower depth
    num_yielded = 0  # drafts of the last candidate
    for survival, position, _, count in offers:
        if position > batch_depth:
            continue
        while count:
            taken = min(count, size - bought)
            bought += taken
            count -= taken
            counts[position - 1] += taken
            num_deepest += taken if position == batch_depth else 0
            value += taken * survival
            if bought == size:
                if num_deepest:
                    num_yielded = bought
                    yield _priced(snapshot, base, tokens, counts, bought, value)
                following = next(sizes_left, None)
                if following is None:
                    return
                size = following
        if num_deepest and bought > num_yielded and not snapshot.costs.verify.is_padded:
            num_yielded = bought
            yield _priced(snapshot, base, tokens, counts, bought, value)
    if num_deepest and bought > num_yielded:
        yield _priced(snapshot, base, tokens, counts, bought, value)


def _selected(
    snapshot: DepthSnapshot,
    offers: Sequence[_Offer],
    base: _Base,
    tokens: int,
    batch_depth: int,
    sizes: Sequence[int],
) -> Iterator[Candidate]:
    """All rows draft to `batch_depth`, then the likeliest drafts are verified. A share f of them
    holds f ** (1 - gain) of the accepted ones."""
    counts = [*base.fixed_counts, *([0] * (batch_depth - len(base.fixed_counts)))]
    drafted, promised = 0, 0.0
    for survival, position, _, count in offers:
        if position <= batch_depth:
            counts[position - 1] += count
            drafted += count
            promised += count * survival
    for size in sizes:
        if size >= drafted:
            return
        value = base.value + promised * (size / drafted) ** (1 - snapshot.selection_gain)
        found = _priced(snapshot, base, tokens, counts, size, value)
        yield found._replace(num_drafts=found.num_drafts + drafted - size)


def _priced(
    snapshot: DepthSnapshot,
    base: _Base,
    tokens: int,
    counts: Sequence[int],
    bought: int,
    value: float,
) -> Candidate:
    """`counts`: by position, the rows that draft at least that far."""
    costs = snapshot.costs
    draft_s = snapshot.overhead_s if bought else 0.0
    context = float(snapshot.context)
    batch_depth = 0
    for index, rows in enumerate(counts):
        if not rows:
            break
        batch_depth += 1
        draft_s += (costs.next_draft if index else costs.first_draft).at(rows)
        if batch_depth % costs.tile_tokens == 0:  # these rows need another tile
            context += snapshot.context * rows / max(len(snapshot.max_depths), 1)
    verify_s = costs.verify.at(tokens + bought) + context * costs.context_s
    num_drafts = bought + sum(base.fixed_counts)
    return Candidate(batch_depth, num_drafts, num_drafts, value, draft_s, verify_s)


def _depths(
    snapshot: DepthSnapshot,
    offers: Sequence[_Offer],
    best: Candidate,
    ready: Sequence[bool] = (),
) -> Sequence[int]:
    """The candidate's depths by row. Among equal rows, the one more draft rotates from step to
    step. Which rows draft at all rotates slowly: a row that does not falls behind and has to catch
    up first."""
    fixed = snapshot.is_fixed or (False,) * len(snapshot.max_depths)
    left = best.num_drafts - sum(
        limit for limit, is_fixed in zip(snapshot.max_depths, fixed, strict=True) if is_fixed
    )
    depth_of: dict[tuple[float, ...], int] = {}
    partial: tuple[tuple[float, ...], int] | None = None
    for _, position, kind, count in offers:
        if position > best.batch_depth:
            continue
        if count > left:
            partial = (kind, left) if left else None
            break
        depth_of[kind] = position
        left -= count
    depths = [
        limit if is_fixed else depth_of.get(kind, 0)
        for kind, limit, is_fixed in zip(
            snapshot.survivals, snapshot.max_depths, fixed, strict=True
        )
    ]
    if partial is not None:
        kind, extra = partial
        alike = [
            i
            for i, each in enumerate(snapshot.survivals)
            if each == kind and not fixed[i] and (not ready or ready[i])
        ]
        turn = snapshot.step if kind in depth_of else snapshot.step // _TURN
        start = turn * extra % len(alike)
        for index in (alike[start:] + alike[:start])[:extra]:
            depths[index] += 1
    return depths


def _only_fixed(snapshot: DepthSnapshot, candidates: Sequence[Candidate] = ()) -> DepthChoice:
    """Plain decoding, except for rows with a depth fixed by their client."""
    depths: Sequence[int] = [0] * len(snapshot.max_depths)
    if any(snapshot.is_fixed):
        kept = zip(snapshot.max_depths, snapshot.is_fixed, strict=True)
        fixed_depths = [limit if is_fixed else 0 for limit, is_fixed in kept]
        depths = cut_evenly(fixed_depths, snapshot.room, snapshot.step)
    shown = sorted(candidates[1:], key=lambda each: -each.tokens_per_s)[:7]
    plain = candidates[0] if candidates else None
    return DepthChoice(depths, None, plain, (*candidates[:1], *shown))
