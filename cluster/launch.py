"""What a server asks of whoever starts its engines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from outrider.cluster.events import Say
from outrider.config import EngineConfig
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace


class Launch(Protocol):
    """A way to have replicas."""

    on_change: list[Callable[[], None]]
    """Who hears that `places` are others now, on the event loop."""

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        """All there are, as last heard. Addresses are such that this process reaches the first."""

    @property
    def config(self) -> EngineConfig | None:
        """Of the next replica, as far as known: what was ordered before counts."""

    async def view(self) -> ClusterView | None:
        """How their processes fare, as far as whoever starts them knows."""

    async def keep(self, say: Say) -> None:
        """Start them and keep them running until `stop`. Raises what is beyond repair."""

    async def scale(self, num_replicas: int) -> None:
        """Have so many; returns when that is done, raises `OutriderError` if it could not be."""

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        """Replace all, one after the other, or only their drafts where that is possible; returns
        and raises likewise."""

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        """Have no replica on a host of these addresses, which ends by then: moved where there is
        room, else drained; returns and raises likewise."""

    async def stop(self) -> None:
        """End all processes."""

    def abort(self) -> None:
        """End them at once: this process will have ended when the call returns, or just after."""
