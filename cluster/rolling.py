"""Replicas replaced one after the other, each behind a gate.

With room for both, the successor answers requests before its predecessor drains. Without it, the
predecessor ends first, while the other replicas serve. A successor that does not come to serve ends
the loop, and all that was replaced is put back, the last one first.

The same for the replicas of a controller (`outrider.cluster.replica_set`) and for RayClusters in
Kubernetes (`outrider.cluster.kube_rollout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, Kind, Say
from outrider.errors import OutriderError


class Swap(Protocol):
    """One replica and its successor. Every step raises `OutriderError` if it fails."""

    name: str

    async def has_room(self) -> bool:
        """Whether the successor may start while the predecessor serves."""

    async def start(self) -> None:
        """Start the successor; returns once it has answered a probe and may be relied on."""

    async def retire(self) -> None:
        """Drain the predecessor and end it, in such a way that `undo` can bring it back."""

    async def undo(self) -> None:
        """Have the predecessor serve again and end the successor, from whatever state."""


async def roll(swaps: Sequence[Swap], say: Say) -> None:
    """Replace them in this order. Raises why one could not be, after all are as they were."""
    begun: list[Swap] = []
    for swap in swaps:
        begun.append(swap)
        try:
            if await swap.has_room():
                await swap.start()
                await swap.retire()
            else:
                await swap.retire()
                await swap.start()
        except OutriderError as error:
            failures = await _undo(begun, say)
            reason = f"replica {swap.name} stays as it was: {error}"
            if failures:
                reason = f"replica {swap.name} was not replaced: {error} {' '.join(failures)}"
            raise ClusterError(reason) from error


async def _undo(begun: Sequence[Swap], say: Say) -> list[str]:
    """What of it failed. Goes on after a failure: the others can still be put back."""
    failures = []
    for swap in reversed(begun):
        if swap is not begun[-1]:
            say(Event(Kind.STAGE, f"replica {swap.name} is rolled back"))
        try:
            await swap.undo()
        except OutriderError as error:
            failures.append(f"Replica {swap.name} could not be rolled back: {error}")
            say(Event(Kind.TROUBLE, failures[-1]))
    return failures
