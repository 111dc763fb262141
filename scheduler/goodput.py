"""The policy that maximises committed tokens per second: what to draft, decided before drafting.

Everything that may be drafted is a pair (row, j). Survival never rises with j, so what is bought is
a prefix per row. For each highest level and each size of the target's pass the likeliest drafts are
taken until it is full; what they promise, over what drafting and verifying them take, is compared
with all others and with plain decoding. Opening a level costs the same for one row or for many, so
buying draft by draft would misjudge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from outrider.scheduler.depths import Candidate, Choice, DepthSnapshot, cut_evenly
from outrider.scheduler.proposers import MOST_BEHIND

# To leave what the last step did, something else must promise so much more: recordings do not
# flap, and where nothing is to be gained nothing is risked.
_STAY = 1.01
_SPECULATE = 1.02
_SPECULATE_BY_LOOK_UP = 1.05  # where most steps find nothing, which weighing costs all the same
_SPECULATE_SURELY = 0.98  # where drafts end as soon as they are not sure: they give more than told
_PAYS_WITHIN = 32  # steps, or catching up is for nothing
_RISK = 0.05  # what all rows have to promise beyond that, if none of them drafts yet
_MOST_CERTAIN = 0.9  # survival: a draft of that is worth it whatever is thought of costs
_TURN = 64  # steps for which the same rows draft, where there is room for some of those alike


class _Offer(NamedTuple):
    """Draft `level` of rows that are alike."""

    survival: float
    level: int
    kind: tuple[float, ...]  # their survivals, by which they are known
    num_rows: int


class _Base(NamedTuple):
    """What a step holds whatever is drafted."""

    rows: int  # decode rows
    tokens: int  # of the pass without any draft that is to be decided on
    value: float  # committed tokens of these
    levels: tuple[int, ...]  # rows that draft at least so far because their client said so
    room: int


def goodput(snapshot: DepthSnapshot) -> Choice:
    offers, base = _offers(snapshot), _base(snapshot)
    if not offers or base.room <= 0:
        return _only_fixed(snapshot)
    candidates: Sequence[Candidate] = list(_candidates(snapshot, offers, base, base.rows))
    best = max(candidates, key=lambda each: _rate(each, snapshot))
    if best.num_drafts <= candidates[0].num_drafts:
        return _only_fixed(snapshot, candidates)
    depths = _depths(snapshot, offers, best)
    if not snapshot.previous_level and not _pays_soon(snapshot, candidates[0], best, depths):
        return _only_fixed(snapshot, candidates)
    level, least = best.level, 0.0
    if snapshot.num_prompt_tokens or any(behind > MOST_BEHIND for behind in snapshot.behind):
        depths, best, candidates = _for_now(snapshot, base, depths, best.tokens_per_s)
    elif snapshot.can_stop:  # how sure a draft is tells more than averages do
        depths, least = snapshot.wanted, _worth_going_on(snapshot, best)
    shown = sorted(candidates[1:], key=lambda each: -each.tokens_per_s)[:7]
    selected = best.num_verified if best.num_verified < best.num_drafts else None
    return Choice(depths, selected, best, (candidates[0], *shown), level, least)


def _worth_going_on(snapshot: DepthSnapshot, best: Candidate) -> float:
    """The survival from which on another draft promises more than it costs to make and to verify.
    That it may be wrong itself is left out, as drafts are right more often than they are sure of
    it. What verifying one more costs is taken over as many as there may be: the difference of two
    neighbouring sizes is lost in what disturbs both."""
    verify, deepest = snapshot.costs.verify, max(snapshot.wanted)
    row_s = (verify.at(1 + deepest) - verify.at(1)) / deepest
    return min(best.tokens_per_s * (snapshot.costs.next_draft.at(1) + row_s), _MOST_CERTAIN)


def _pays_soon(
    snapshot: DepthSnapshot, plain: Candidate, best: Candidate, depths: Sequence[int]
) -> bool:
    """Whether it is worth it to begin: rows that are behind have to catch up first, and before long
    they will have ended, or what is hoped of them will have turned out wrong."""
    missing = num_behind = num_drafting = 0
    for behind, depth in zip(snapshot.behind, depths, strict=True):
        if depth:
            num_drafting += 1
            if behind > MOST_BEHIND:
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
    """Of a step unlike those to come: prompts come along whatever is drafted, and rows that are
    behind catch up for later. So time is what counts, at the `price` of what is drafted with
    everybody there and nothing else to do."""
    ready = [behind <= MOST_BEHIND for behind in snapshot.behind]
    # What is spent on prompts is spent; and who does not draft now loses the next step as well, to
    # catch up.
    snapshot = replace(snapshot, overhead_s=0.0)
    alone_s = snapshot.costs.verify.at(base.rows) + snapshot.context * snapshot.costs.context_s
    kept = max(price * alone_s / base.rows - 1.0, 0.0)
    offers = _offers(snapshot, ready, kept)
    if not offers:
        plain = _priced(snapshot, base, base.tokens, base.levels, 0, base.value)
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
    if not candidate.level:
        least = _SPECULATE_BY_LOOK_UP if snapshot.only_looks_up else _SPECULATE
        rate *= _SPECULATE_SURELY if snapshot.can_stop else least
    return rate * _STAY if candidate.level == snapshot.previous_level else rate


def _offers(snapshot: DepthSnapshot, ready: Sequence[bool] = (), kept: float = 0.0) -> list[_Offer]:
    """All that may be bought, of rows that are `ready` or else of all: the likeliest first, and of
    one kind the nearest first. `kept` is what it is worth besides that a row drafts at all."""
    survivals = snapshot.survivals
    if snapshot.is_fixed:
        free = zip(survivals, snapshot.is_fixed, strict=True)
        survivals = [() if is_fixed else kind for kind, is_fixed in free]
    if ready:
        survivals = [kind if each else () for kind, each in zip(survivals, ready, strict=True)]
    kinds = Counter(survivals)
    offers = [
        _Offer(survival + kept if level == 1 else survival, level, kind, count)
        for kind, count in kinds.items()
        for level, survival in enumerate(kind, 1)
    ]
    offers.sort(key=lambda offer: (-offer.survival, offer.level))
    return offers


def _base(snapshot: DepthSnapshot) -> _Base:
    rows = len(snapshot.wanted)
    value, drafts = float(rows), 0
    levels: tuple[int, ...] = ()
    if any(snapshot.is_fixed):
        fixed = [
            kind for kind, fixed in zip(snapshot.survivals, snapshot.is_fixed, strict=True) if fixed
        ]
        value += sum(map(sum, fixed))
        deepest = max(map(len, fixed), default=0)
        levels = tuple(sum(len(kind) > level for kind in fixed) for level in range(deepest))
        drafts = sum(levels)
    tokens = rows + drafts + snapshot.num_prompt_tokens
    return _Base(rows + drafts, tokens, value, levels, snapshot.room - drafts)


def _candidates(
    snapshot: DepthSnapshot, offers: Sequence[_Offer], base: _Base, tokens: int
) -> Iterator[Candidate]:
    """Plain decoding, then some amounts for each highest level; `tokens` are there anyway."""
    yield _priced(snapshot, base, tokens, base.levels, 0, base.value)
    deepest = max(offer.level for offer in offers)
    sizes = _amounts(snapshot, tokens, base.room)
    for level in range(1, deepest + 1):
        yield from _of_level(snapshot, offers, base, tokens, level, sizes)
        if snapshot.selection_gain:
            yield from _selected(snapshot, offers, base, tokens, level, sizes)


def _amounts(snapshot: DepthSnapshot, tokens: int, room: int) -> Sequence[int]:
    """How many drafts fill the pass to one of its sizes."""
    most = tokens + room
    return [size - tokens for size in snapshot.costs.verify.sizes if tokens < size < most] + [room]


def _of_level(
    snapshot: DepthSnapshot,
    offers: Sequence[_Offer],
    base: _Base,
    tokens: int,
    level: int,
    sizes: Sequence[int],
) -> Iterator[Candidate]:
    counts = [*base.levels, *([0] * (level - len(base.levels)))]
    value, bought, sizes_left = base.value, 0, iter(sizes)
    size = next(sizes_left)
    own = 0  # drafts of the level itself: without one, a lower level says the same
    told = 0  # of the last candidate
    for survival, at, _, count in offers:
        if at > level:
            continue
        while count:
            taken = min(count, size - bought)
            bought += taken
            count -= taken
            counts[at - 1] += taken
            own += taken if at == level else 0
            value += taken * survival
            if bought == size:
                if own:
                    told = bought
                    yield _priced(snapshot, base, tokens, counts, bought, value)
                following = next(sizes_left, None)
                if following is None:
                    return
                size = following
        if own and bought > told and not snapshot.costs.verify.is_padded:
            told = bought
            yield _priced(snapshot, base, tokens, counts, bought, value)
    if own and bought > told:
        yield _priced(snapshot, base, tokens, counts, bought, value)


def _selected(
    snapshot: DepthSnapshot,
    offers: Sequence[_Offer],
    base: _Base,
    tokens: int,
    level: int,
    sizes: Sequence[int],
) -> Iterator[Candidate]:
    """All rows draft up to the level, and once the drafts are there the likeliest are verified. A
    share f of them then holds f ** (1 - gain) of those that are right."""
    counts = [*base.levels, *([0] * (level - len(base.levels)))]
    drafted, promised = 0, 0.0
    for survival, at, _, count in offers:
        if at <= level:
            counts[at - 1] += count
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
    """`counts` says how many rows draft at least so far."""
    costs = snapshot.costs
    draft_s = snapshot.overhead_s if bought else 0.0
    context = float(snapshot.context)
    num_levels = 0
    for index, rows in enumerate(counts):
        if not rows:
            break
        num_levels += 1
        draft_s += (costs.next_draft if index else costs.first_draft).at(rows)
        if num_levels % costs.tile_tokens == 0:  # these rows need another tile
            context += snapshot.context * rows / max(len(snapshot.wanted), 1)
    verify_s = costs.verify.at(tokens + bought) + context * costs.context_s
    num_drafts = bought + sum(base.levels)
    return Candidate(num_levels, num_drafts, num_drafts, value, draft_s, verify_s)


def _depths(
    snapshot: DepthSnapshot,
    offers: Sequence[_Offer],
    best: Candidate,
    ready: Sequence[bool] = (),
) -> Sequence[int]:
    """By row what the candidate stands for. Of rows alike, who gets one more than the others
    changes from step to step; but who drafts at all only now and then, as whoever does not falls
    behind and has to catch up first."""
    fixed = snapshot.is_fixed or (False,) * len(snapshot.wanted)
    left = best.num_drafts - sum(
        most for most, is_fixed in zip(snapshot.wanted, fixed, strict=True) if is_fixed
    )
    depth_of: dict[tuple[float, ...], int] = {}
    partial: tuple[tuple[float, ...], int] | None = None
    for _, level, kind, count in offers:
        if level > best.level:
            continue
        if count > left:
            partial = (kind, left) if left else None
            break
        depth_of[kind] = level
        left -= count
    depths = [
        most if is_fixed else depth_of.get(kind, 0)
        for kind, most, is_fixed in zip(snapshot.survivals, snapshot.wanted, fixed, strict=True)
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


def _only_fixed(snapshot: DepthSnapshot, candidates: Sequence[Candidate] = ()) -> Choice:
    """Plain decoding, but for rows whose client has said how deep."""
    depths: Sequence[int] = [0] * len(snapshot.wanted)
    if any(snapshot.is_fixed):
        kept = zip(snapshot.wanted, snapshot.is_fixed, strict=True)
        wanted = [most if is_fixed else 0 for most, is_fixed in kept]
        depths = cut_evenly(wanted, snapshot.room, snapshot.step)
    shown = sorted(candidates[1:], key=lambda each: -each.tokens_per_s)[:7]
    plain = candidates[0] if candidates else None
    return Choice(depths, None, plain, (*candidates[:1], *shown))
