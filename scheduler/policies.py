"""Policies by name: who decides how far each row is drafted."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.scheduler.depths import (
    Candidate,
    Choice,
    ChooseDepths,
    DepthSnapshot,
    cut_evenly,
    fixed_depths,
    no_depths,
)
from outrider.scheduler.goodput import goodput

_LOW, _HIGH = 0.4, 0.8  # acceptance that moves `threshold` down, and up
_TRY_EVERY, _TRIES = 128, 8  # steps: what is not drafted is not learned of


def threshold(snapshot: DepthSnapshot) -> Choice:
    """By arrival rate and average acceptance, without a model of cost: shallower the more of the
    seats arriving requests would take, less so where drafts are right; a level down under 0.4 of
    them right, one up over 0.8. Nothing is drafted where that leaves no level, but now and then for
    a few steps, if only because too few were right."""
    deepest = max(snapshot.wanted, default=0)
    pressure = min(snapshot.load, 1.0) * (1.0 - min(snapshot.acceptance, 1.0) / 2)
    ceiling = round(deepest * (1.0 - pressure))
    level = snapshot.previous_level
    if snapshot.acceptance < _LOW:
        level -= 1
    elif snapshot.acceptance > _HIGH or not level:
        level += 1
    if snapshot.step % _TRY_EVERY < _TRIES:
        level = max(level, 1)
    level = max(min(level, ceiling, deepest), 0)
    fixed = snapshot.is_fixed or (False,) * len(snapshot.wanted)
    wanted = [
        most if is_fixed else min(most, level)
        for most, is_fixed in zip(snapshot.wanted, fixed, strict=True)
    ]
    return Choice(cut_evenly(wanted, snapshot.room, snapshot.step))


def trim(snapshot: DepthSnapshot) -> Choice:
    """Everybody drafts as deep as configured; then only the likeliest drafts are verified, as many
    as pay by their chances. The draft is paid for by then: that is what this policy is there to
    be compared with."""
    depths = snapshot.wanted
    values = sorted((s for kind in snapshot.survivals for s in kind), reverse=True)
    num_drafts, rows = len(values), len(snapshot.wanted)
    if not num_drafts:
        return Choice(depths)
    costs, base = snapshot.costs, rows + snapshot.num_prompt_tokens
    counts = [sum(most > level for most in depths) for level in range(max(depths))]
    draft_s = costs.first_draft.at(counts[0]) + sum(costs.next_draft.at(n) for n in counts[1:])
    context_s = snapshot.context * costs.context_s
    best: Candidate | None = None
    tokens = float(rows)
    for number, survival in enumerate(values[: snapshot.room], 1):
        tokens += survival
        verify_s = costs.verify.at(base + number) + context_s
        found = Candidate(len(counts), num_drafts, number, tokens, draft_s, verify_s)
        if best is None or found.tokens_per_s > best.tokens_per_s:
            best = found
    if best is None:
        return Choice([0] * rows)
    selected = best.num_verified if best.num_verified < num_drafts else None
    return Choice(depths, selected, best)


GOODPUT, TRIM, FIXED, OFF = "goodput", "trim", "fixed", "off"
FIXED_DEPTH_POLICIES = (TRIM, FIXED)
"""They draft to the depth, whatever it is worth; others at most to it."""
POLICIES: Mapping[str, ChooseDepths] = {
    GOODPUT: goodput,
    "threshold": threshold,
    TRIM: trim,
    FIXED: fixed_depths,
    OFF: no_depths,
}
