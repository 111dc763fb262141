"""The draft depth of each row of a step: a function of a snapshot, called once a step.

The planner first gives every decode row its one token and prompts their share; what is left of the
pass is `room`. A policy reads only the snapshot and has no side effects: it can be replaced by name
or by any function of the same shape, and is tested with plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from outrider.scheduler.costs import CostTable, StepCosts

NO_COSTS = StepCosts(CostTable((1,), (1.0,)), CostTable((1,), (0.0,)), CostTable((1,), (0.0,)))


class Candidate(NamedTuple):
    """One way to draft in a step, with its predicted tokens and cost."""

    batch_depth: int  # the deepest draft of any row
    num_drafts: int  # in all
    num_verified: int  # of these; fewer only if the likeliest are selected after drafting
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
    proposers: Sequence[str]  # by row; `NO_PROPOSER` where nothing drafts
    max_depths: Sequence[int]  # the row's own limit, and none past its end
    behind: Sequence[int]  # committed tokens its proposer may have to catch up on first
    ready: Sequence[bool]  # whether these are few enough to draft in this step
    is_fixed: Sequence[bool] = ()  # depth fixed by the client; () if no row has one
    survivals: Sequence[tuple[float, ...]] = ()
    """For each draft up to `max_depths`: the probability that it and all before it are accepted.
    Rows with equal estimates share one tuple."""
    context: int = 0  # tokens that attention reads, of all rows together
    costs: StepCosts = NO_COSTS
    overhead_s: float = 0.0  # cost of drafting beside its passes: the draft's prompts
    previous_batch_depth: int = 0  # of the last step that chose one
    load: float = 0.0  # share of the rows that requests would occupy at their arrival rate
    acceptance: float = 0.0  # recent share of verified drafts that were accepted
    selection_gain: float = 0.0  # see `DepthChoice.num_selected`; 0: selection is not available
    can_stop: bool = False  # see `DepthChoice.least_survival`
    only_looks_up: bool = False  # every proposer here may offer fewer drafts than requested
    remaining: Sequence[int] = ()
    """How many tokens each row is assumed to write yet; () while others take the place of rows
    that end."""


@dataclass(frozen=True, slots=True)
class DepthChoice:
    """What a policy decides. Depths are by row, none above `max_depths`, in all at most `room`, or
    with `num_selected`, that many. The planner may still cut a depth for lack of memory, and lets a
    row that is too far behind catch up instead."""

    depths: Sequence[int]
    num_selected: int | None = None  # verify only this many of all drafts, the likeliest
    chosen: Candidate | None = None
    candidates: Sequence[Candidate] = field(default=())  # plain decoding first, then the best found
    # In a step without prompts or catching up; None: that of `depths`.
    batch_depth: int | None = None
    least_survival: float = 0.0  # a row's drafting ends with the first draft below this survival


ChooseDepths: TypeAlias = Callable[[DepthSnapshot], DepthChoice]


def fixed_depths(snapshot: DepthSnapshot) -> DepthChoice:
    """Every row drafts to its limit. If that exceeds `room`, all are cut to a common depth, and
    which rows get one more rotates from step to step."""
    return DepthChoice(cut_evenly(snapshot.max_depths, snapshot.room, snapshot.step))


def no_depths(snapshot: DepthSnapshot) -> DepthChoice:
    """Only rows with a depth fixed by their client draft."""
    if not snapshot.is_fixed:
        return DepthChoice([0] * len(snapshot.max_depths))
    depths = [
        depth if fixed else 0
        for depth, fixed in zip(snapshot.max_depths, snapshot.is_fixed, strict=True)
    ]
    return DepthChoice(cut_evenly(depths, snapshot.room, snapshot.step))


def cut_evenly(max_depths: Sequence[int], room: int, step: int) -> Sequence[int]:
    if sum(max_depths) <= room:
        return max_depths
    common = _common_depth(max_depths, room)
    depths = [min(each, common) for each in max_depths]
    left = room - sum(depths)
    start = step % len(depths)
    for index in (*range(start, len(depths)), *range(start)):
        if not left:
            break
        if max_depths[index] > common:
            depths[index] += 1
            left -= 1
    return depths


def _common_depth(max_depths: Sequence[int], room: int) -> int:
    """The highest depth that all rows can be cut to together."""
    left, common = room, 0
    while True:
        left -= sum(1 for each in max_depths if each > common)
        if left < 0:
            return common
        common += 1
