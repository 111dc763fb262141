"""How far a server or an engine drafts, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.scheduler.policies import FIXED, GOODPUT, OFF

if TYPE_CHECKING:
    from outrider.links.speculation import SpeculationSettings, SpeculationStatus

NONE = "none"


MEANINGS = {
    GOODPUT: "at every step what should give most tokens per second",
    "threshold": "fewer the more requests arrive and the fewer drafts are right",
    "trim": "of which only the likeliest are verified",
    FIXED: "at every step",
    OFF: "nobody drafts",
}


def settings_lines(settings: SpeculationSettings) -> list[str]:
    """What holds, and what the engine began with where that was something else."""
    policy = f"policy     {settings.policy}: {meaning(settings)}"
    if settings.first_policy != settings.policy:
        policy += f" (the engine began with {settings.first_policy})"
    bound = f"max depth  {_shown(settings.max_depth)}"
    if settings.max_depth is None:
        bound += f": each request's own limit, {settings.depth} unless it says otherwise"
    if settings.first_max_depth != settings.max_depth:
        bound += f" (the engine began with {_shown(settings.first_max_depth)})"
    return [policy, bound]


def meaning(settings: SpeculationSettings) -> str:
    """A policy in a few words, as it works on this server."""
    if settings.policy == GOODPUT and not settings.is_weighed:
        return "costs were not measured here, so it drafts at every step as fixed does"
    return MEANINGS.get(settings.policy, "as its own code says")


def most_drafts(settings: SpeculationSettings) -> int:
    """Of a request that does not ask for another number."""
    bound = settings.max_depth
    return settings.depth if bound is None else min(settings.depth, bound)


def speculation_sentence(found: SpeculationStatus, method: str | None, reason: str = "") -> str:
    """What was chosen and why. `method` is who drafts, `reason` why so far at most."""
    settings = found.settings
    if method is None:
        return "speculation: off, as there is nobody to draft"
    if settings.policy == OFF:
        return f"speculation: off; `outrider speculation set --policy {GOODPUT}` turns it on"
    if settings.max_depth == 0:
        return f"speculation: off; `outrider speculation set --max-depth {NONE}` turns it on"
    is_auto = settings.policy == GOODPUT
    text = f"speculation: {'auto (goodput)' if is_auto else settings.policy}, "
    is_bound = is_auto or settings.policy == "threshold"
    count = most_drafts(settings)
    text += f"{'up to ' if is_bound else ''}{count} {'draft' if count == 1 else 'drafts'} a request"
    if reason:
        text += f" ({reason})"
    text += f", {meaning(settings)}"
    if found.draft_cost is not None:
        text += f"; drafting one token costs {found.draft_cost:.0%} of a pass here"
    return text


def _shown(bound: int | None) -> str:
    return NONE if bound is None else str(bound)
