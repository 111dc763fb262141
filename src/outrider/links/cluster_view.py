"""What whoever starts the processes of a server knows of them."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All of them; see `ClusterState` of the protocol."""

    controller: str
    state: str
    restarts: int
    draft_restarts: int
    processes: tuple[ProcessView, ...]
