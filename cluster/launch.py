"""The interface of a server to its replicas: local, or in a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from outrider.cluster.events import Say
from outrider.config import EngineConfig
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace


class Launch(Protocol):
    """Starts and supervises the replicas of a server."""

    on_change: list[Callable[[], None]]
    """Called on the event loop when `places` change."""

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        """All replicas, as last known. This process can reach the first address of each."""

    @property
    def config(self) -> EngineConfig | None:
        """The configuration of the next replica, if known; includes earlier rollouts."""

    async def view(self) -> ClusterView | None:
        """The state of the replicas' processes; None if unknown."""

    async def run(self, say: Say) -> None:
        """Start the replicas and supervise them until `stop`. Raises unrecoverable failures."""

    async def scale(self, num_replicas: int) -> None:
        """Change the number of replicas; returns when done, raises `OutriderError` on failure."""

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        """Replace all replicas one by one, or only their drafts where possible; returns and raises
        as `scale`."""

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        """Clear the hosts with these addresses, which end within `limit_s`: replicas move where
        there are resources, else drain; returns and raises as `scale`."""

    async def stop(self) -> None:
        """End all processes."""

    def abort(self) -> None:
        """End all processes at once: this process exits right after."""
