"""What is known of a server's processes, on its way to `outrider status`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeAlias

from outrider.links.cluster_view import ClusterView, ProcessView
from outrider.proto import control_pb2

AskCluster: TypeAlias = Callable[[], Awaitable[ClusterView | None]]
"""How the processes fare; None if nobody can tell."""


async def nobody_knows() -> ClusterView | None:
    """For an engine that somebody else has started."""
    return None


def cluster_to_proto(view: ClusterView) -> control_pb2.ClusterState:
    return control_pb2.ClusterState(
        controller=view.controller,
        state=view.state,
        restarts=view.restarts,
        draft_restarts=view.draft_restarts,
        processes=[control_pb2.ProcessState(**asdict(each)) for each in view.processes],
    )


def cluster_from_proto(state: control_pb2.ClusterState) -> ClusterView:
    processes = (
        ProcessView(p.role, p.rank, p.pid, p.node, tuple(p.gpu_ids), p.restarts, p.state)
        for p in state.processes
    )
    return ClusterView(
        state.controller, state.state, state.restarts, state.draft_restarts, tuple(processes)
    )
