"""Rolling update: replaces replicas one after the other, each behind a readiness gate.

With resources for both, the successor serves before its predecessor drains. Otherwise the
predecessor ends first, while the other replicas serve. If a successor does not serve, all replaced
replicas are rolled back, the last one first.

Used for the replicas of a controller (`outrider.cluster.replica_set`) and for RayClusters in
Kubernetes (`outrider.cluster.deploy.kube_rollout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, EventKind, Say
from outrider.errors import OutriderError


class Swap(Protocol):
    """One replica and its successor. Every step raises `OutriderError` on failure."""

    name: str

    async def can_surge(self) -> bool:
        """Whether the successor may start while the predecessor serves."""

    async def start(self) -> None:
        """Start the successor; returns once it has passed a probe."""

    async def retire(self) -> None:
        """Drain and end the predecessor; `undo` must be able to restore it."""

    async def undo(self) -> None:
        """Restore the predecessor and end the successor, from any state."""


async def roll(swaps: Sequence[Swap], say: Say) -> None:
    """Replace all in this order. On a failure, rolls back and raises its cause."""
    begun: list[Swap] = []
    for swap in swaps:
        begun.append(swap)
        try:
            if await swap.can_surge():
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
    """Roll back; returns the failures. Continues after a failure with the other replicas."""
    failures = []
    for swap in reversed(begun):
        if swap is not begun[-1]:
            say(Event(EventKind.STAGE, f"replica {swap.name} is rolled back"))
        try:
            await swap.undo()
        except OutriderError as error:
            failures.append(f"Replica {swap.name} could not be rolled back: {error}")
            say(Event(EventKind.TROUBLE, failures[-1]))
    return failures
