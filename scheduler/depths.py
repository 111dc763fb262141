"""How far each row of a step is drafted: a function of a snapshot, called once a step.

The planner gives every decode row its one token and prompts their share before it asks; what is
left of the pass is `room`. A policy knows nothing else and changes nothing: it can be replaced by
name or by any function of the same shape, and is tested with plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from outrider.scheduler.costs import CostTable, StepCosts

NO_COSTS = StepCosts(CostTable((1,), (1.0,)), CostTable((1,), (0.0,)), CostTable((1,), (0.0,)))


class Candidate(NamedTuple):
    """One way to draft in a step, and what it should come to."""

    level: int  # the deepest draft of any row
    num_drafts: int  # in all
    num_verified: int  # of these; fewer only if the likeliest are selected once they are there
    tokens: float  # expected to be committed
    draft_s: float
    verify_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s

    @property
    def tokens_per_s(self) -> float:
        seconds = self.draft_s + self.verify_s
        return self.tokens / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class DepthSnapshot:
    """A step before drafts are planned. Lists are by decode row, in one order."""

    step: int
    room: int  # tokens of the target's pass that drafts may take
    num_prompt_tokens: int  # in the same pass
    num_waiting: int  # requests without a row
    proposers: Sequence[str]  # who drafts for the row, if anybody
    wanted: Sequence[int]  # the most the row can use: its own limit, and none past its end
    behind: Sequence[int]  # committed tokens its proposer may have to catch up on first
    is_fixed: Sequence[bool] = ()  # the client has said how deep; () where nobody has
    survivals: Sequence[tuple[float, ...]] = ()
    """For each draft up to `wanted`: the chance that it and all before it are right. Rows of which
    the same is known have the same tuple."""
    context: int = 0  # tokens that attention reads, of all rows together
    costs: StepCosts = NO_COSTS
    overhead_s: float = 0.0  # what drafting costs a step beside its passes: the draft's prompts
    previous_level: int = 0  # of the last step that had a choice
    load: float = 0.0  # share of the seats that requests would take at the rate they arrive
    acceptance: float = 0.0  # share of drafts that were right of those verified, lately
    selection_gain: float = 0.0  # see `Choice.num_selected`; 0 where nothing can be selected
    can_stop: bool = False  # see `Choice.least_survival`
    only_looks_up: bool = False  # any proposer of these rows: it may find less than it is asked for


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy says. Depths are by row, none above `wanted`, in all at most `room`, or with
    `num_selected`, that many. The planner may still cut a depth for which there is no memory, and
    has a row catch up that is too far behind to be drafted for."""

    depths: Sequence[int]
    num_selected: int | None = None  # verify only so many of all drafts, the likeliest
    chosen: Candidate | None = None
    candidates: Sequence[Candidate] = field(default=())  # plain decoding first, then the best found
    level: int | None = None  # to be drafted once nothing else is to be done; None: as `depths` say
    least_survival: float = 0.0  # a draft less likely to be right, with all before it, is the last


ChooseDepths: TypeAlias = Callable[[DepthSnapshot], Choice]


def fixed_depths(snapshot: DepthSnapshot) -> Choice:
    """Every row what it wants; if that is too much, all are cut to the same level, and who gets one
    more than the others changes from step to step."""
    return Choice(cut_evenly(snapshot.wanted, snapshot.room, snapshot.step))


def no_depths(snapshot: DepthSnapshot) -> Choice:
    """Nobody drafts, but who has a depth fixed by its client."""
    if not snapshot.is_fixed:
        return Choice([0] * len(snapshot.wanted))
    kept = [
        most if fixed else 0 for most, fixed in zip(snapshot.wanted, snapshot.is_fixed, strict=True)
    ]
    return Choice(cut_evenly(kept, snapshot.room, snapshot.step))


def cut_evenly(wanted: Sequence[int], room: int, step: int) -> Sequence[int]:
    if sum(wanted) <= room:
        return wanted
    level = _level(wanted, room)
    depths = [min(each, level) for each in wanted]
    left = room - sum(depths)
    start = step % len(depths)
    for index in (*range(start, len(depths)), *range(start)):
        if not left:
            break
        if wanted[index] > level:
            depths[index] += 1
            left -= 1
    return depths


def _level(wanted: Sequence[int], room: int) -> int:
    """The highest depth that all rows can be cut to together."""
    left, level = room, 0
    while True:
        left -= sum(1 for each in wanted if each > level)
        if left < 0:
            return level
        level += 1
