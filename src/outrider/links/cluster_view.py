"""The processes of a server, as the controller that starts them knows them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.compat_fields import added_field


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
    replica: str = ""  # the name of its replica; none for a gateway


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica; see `ReplicaState` of the protocol."""

    name: str
    state: str
    restarts: int
    draft_restarts: int
    placement_s: float | None = added_field(None)  # time it has waited for placement
    start_s: float | None = added_field(None)  # duration of its last start, once placed


@dataclass(frozen=True, slots=True)
class OperationView:
    """The operator's last order; see `OrderState` of the protocol."""

    what: str
    state: str  # "under way", "done" or "failed"
    detail: str  # its progress, or why it failed


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All processes and replicas; see `ClusterState` of the protocol."""

    controller: str
    state: str
    restarts: int
    draft_restarts: int
    processes: tuple[ProcessView, ...]
    replicas: tuple[ReplicaView, ...] = ()
    order: OperationView | None = None
    num_configured: int | None = added_field(None)  # configured number of replicas
