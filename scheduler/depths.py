"""How far each row of a step is drafted: a function of a snapshot, called once a step.

The planner gives every decode row its one token and prompts their share before it asks; what is
left of the pass is `room`. A policy knows nothing else and changes nothing: it can be replaced by
name or by any function of the same shape, and is tested with plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class DepthSnapshot:
    """The decode rows of a step before drafts are planned. Lists are by row, in one order."""

    step: int
    room: int  # tokens of the target's pass that drafts may take
    num_prompt_tokens: int  # in the same pass
    num_waiting: int  # requests without a row
    proposers: Sequence[str]  # who drafts for the row, if anybody
    wanted: Sequence[int]  # the most the row can use: its own limit, and none past its end
    behind: Sequence[int]  # committed tokens its proposer may have to catch up on first


ChooseDepths: TypeAlias = Callable[[DepthSnapshot], Sequence[int]]
"""Depths by row, none above `wanted`, in all at most `room`. The planner may still cut a depth for
which there is no memory, and has a row catch up that is too far behind to be drafted for."""


def fixed_depths(snapshot: DepthSnapshot) -> Sequence[int]:
    """Every row what it wants; if that is too much, all are cut to the same level, and who gets one
    more than the others changes from step to step."""
    wanted, room = snapshot.wanted, snapshot.room
    if sum(wanted) <= room:
        return wanted
    level = _level(wanted, room)
    depths = [min(each, level) for each in wanted]
    left = room - sum(depths)
    start = snapshot.step % len(depths)
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
