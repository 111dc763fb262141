"""Policies by name: each chooses the draft depths of a step."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.scheduler.depths import (
    Candidate,
    ChooseDepths,
    DepthChoice,
    DepthSnapshot,
    cut_evenly,
    fixed_depths,
    no_depths,
)
from outrider.scheduler.goodput import goodput

AHEAD_AUTO, AHEAD_ON, AHEAD_OFF = AHEAD_MODES = ("auto", "on", "off")
"""Whether a draft in a rank of its own drafts ahead of outcomes; see `ahead.py`."""

_LOW, _HIGH = 0.4, 0.8  # acceptance below which `threshold` goes down, above which it goes up
_TRY_EVERY, _TRIES = 128, 8  # steps: acceptance is only learned by drafting


def threshold(snapshot: DepthSnapshot) -> DepthChoice:
    """By arrival rate and average acceptance, without a cost model. The depth falls with the load,
    less so where drafts are accepted; it goes down by one under 0.4 acceptance and up by one over
    0.8. At depth 0 a few steps are tried now and then, unless load alone forbids drafting."""
    deepest = max(snapshot.max_depths, default=0)
    pressure = min(snapshot.load, 1.0) * (1.0 - min(snapshot.acceptance, 1.0) / 2)
    ceiling = round(deepest * (1.0 - pressure))
    batch_depth = snapshot.previous_batch_depth
    if snapshot.acceptance < _LOW:
        batch_depth -= 1
    elif snapshot.acceptance > _HIGH or not batch_depth:
        batch_depth += 1
    if snapshot.step % _TRY_EVERY < _TRIES:
        batch_depth = max(batch_depth, 1)
    batch_depth = max(min(batch_depth, ceiling, deepest), 0)
    fixed = snapshot.is_fixed or (False,) * len(snapshot.max_depths)
    depths = [
        limit if is_fixed else min(limit, batch_depth)
        for limit, is_fixed in zip(snapshot.max_depths, fixed, strict=True)
    ]
    return DepthChoice(cut_evenly(depths, snapshot.room, snapshot.step))


def trim(snapshot: DepthSnapshot) -> DepthChoice:
    """Every row drafts to its limit; then only the likeliest drafts are verified, as many as pay by
    their acceptance probabilities. Drafting is already paid for by then: this policy exists as a
    baseline."""
    depths = snapshot.max_depths
    values = sorted((s for kind in snapshot.survivals for s in kind), reverse=True)
    num_drafts, rows = len(values), len(snapshot.max_depths)
    if not num_drafts:
        return DepthChoice(depths)
    costs, base = snapshot.costs, rows + snapshot.num_prompt_tokens
    counts = [sum(depth > position for depth in depths) for position in range(max(depths))]
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
        return DepthChoice([0] * rows)
    selected = best.num_verified if best.num_verified < num_drafts else None
    return DepthChoice(depths, selected, best)


GOODPUT, TRIM, FIXED, OFF = "goodput", "trim", "fixed", "off"
FIXED_DEPTH_POLICIES = (TRIM, FIXED)
"""These draft to the limit whatever it gains; other policies at most to it."""
POLICIES: Mapping[str, ChooseDepths] = {
    GOODPUT: goodput,
    "threshold": threshold,
    TRIM: trim,
    FIXED: fixed_depths,
    OFF: no_depths,
}
