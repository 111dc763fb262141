"""What whoever starts the processes of a server knows of them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.added_fields import added


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process; see `ProcessState` of the protocol."""

    role: str
    rank: int
    pid: int
    node: str
    gpu_ids: tuple[str, ...]
    restarts: int
    state: str
    replica: str = ""  # the name of the one it belongs to; none for a gateway


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica; see `ReplicaState` of the protocol."""

    name: str
    state: str
    restarts: int
    draft_restarts: int
    placement_s: float | None = added(None)  # it waited for room, or has waited so far
    start_s: float | None = added(None)  # its last start took, once it had room


@dataclass(frozen=True, slots=True)
class OrderView:
    """What an operator has wanted changed last; see `OrderState` of the protocol."""

    what: str
    state: str  # "under way", "done" or "failed"
    detail: str  # how far it has got, or why it failed


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All of them; see `ClusterState` of the protocol."""

    controller: str
    state: str
    restarts: int
    draft_restarts: int
    processes: tuple[ProcessView, ...]
    replicas: tuple[ReplicaView, ...] = ()
    order: OrderView | None = None  # none was ever given
    num_configured: int | None = added(None)  # replicas there should be
