"""Speculation settings and status in words."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from outrider.catalog.proposers import NGRAM
from outrider.scheduler.policies import FIXED, GOODPUT, OFF

if TYPE_CHECKING:
    from outrider.config import EngineConfig
    from outrider.links.speculation import SpeculationSettings, SpeculationStatus

NONE = "none"


MEANINGS = {
    GOODPUT: "at every step what should give most tokens per second",
    "threshold": "fewer the more requests arrive and the fewer drafts are right",
    "trim": "of which only the likeliest are verified",
    FIXED: "at every step",
    OFF: "no drafting",
}


def settings_lines(settings: SpeculationSettings) -> list[str]:
    """The settings, with the engine's initial ones where these differ."""
    policy = f"policy     {settings.policy}: {meaning(settings)}"
    if settings.first_policy != settings.policy:
        policy += f" (initially {settings.first_policy})"
    bound = f"max depth  {_shown(settings.max_depth)}"
    if settings.max_depth is None:
        bound += f": each request's own limit, {settings.depth} unless it says otherwise"
    if settings.first_max_depth != settings.max_depth:
        bound += f" (initially {_shown(settings.first_max_depth)})"
    return [policy, bound]


def meaning(settings: SpeculationSettings) -> str:
    """A policy in a few words, as in effect on this server."""
    if settings.policy == GOODPUT and not settings.is_weighed:
        return "costs were not measured here, so it drafts at every step as fixed does"
    return MEANINGS.get(settings.policy, "as its own code says")


def max_depth_of(settings: SpeculationSettings) -> int:
    """Depth bound of a request without one of its own."""
    bound = settings.max_depth
    return settings.depth if bound is None else min(settings.depth, bound)


def speculation_sentence(found: SpeculationStatus, config: EngineConfig, reason: str = "") -> str:
    """The speculation in effect, and what to run next if there is no draft or head. `config` is the
    engine's settled one, `reason` explains the depth bound."""
    settings, target = found.settings, shlex.quote(config.target.model)
    serve = f"`outrider serve {target}"
    distill = f"`outrider distill draft --target {target} --out ./draft` trains one"
    if config.method is None:
        return (
            f"speculation: off, as {target} has no draft. {serve} --method {NGRAM}` looks guesses "
            f"up in the text, {serve} --draft-model DRAFT` takes a small model of its family or a "
            f"head, and {distill}"
        )
    if settings.policy == OFF:
        return f"speculation: off; `outrider speculation set --policy {GOODPUT}` turns it on"
    if settings.max_depth == 0:
        return f"speculation: off; `outrider speculation set --max-depth {NONE}` turns it on"
    is_auto = settings.policy == GOODPUT
    text = f"speculation: {'auto (goodput)' if is_auto else settings.policy}, "
    if config.method == NGRAM:
        text += "by n-gram lookup, "
    is_bound = is_auto or settings.policy == "threshold"
    count = max_depth_of(settings)
    text += f"{'up to ' if is_bound else ''}{count} {'draft' if count == 1 else 'drafts'} a request"
    if reason:
        text += f" ({reason})"
    text += f", {meaning(settings)}"
    if found.draft_cost is not None:
        text += f"; drafting one token costs {found.draft_cost:.0%} of a pass here"
    if config.draft.model is None and config.head.model is None:
        text += f". A draft guesses more: {serve} --draft-model DRAFT`; {distill}"
    return text


def _shown(bound: int | None) -> str:
    return NONE if bound is None else str(bound)
