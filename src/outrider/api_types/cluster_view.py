"""The status of a server's processes, as protobuf messages and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeAlias

from outrider.links.cluster_view import ClusterView, OperationView, ProcessView
from outrider.proto import control_pb2

AskCluster: TypeAlias = Callable[[], Awaitable[ClusterView | None]]
"""The status of all processes; None without a controller."""


async def no_cluster_view() -> ClusterView | None:
    """For an engine without a controller."""
    return None


def cluster_to_proto(view: ClusterView) -> control_pb2.ClusterState:
    """Without the replicas: the gateway reports them, for all its controllers."""
    state = control_pb2.ClusterState(
        controller=view.controller,
        state=view.state,
        restarts=view.restarts,
        draft_restarts=view.draft_restarts,
        processes=[control_pb2.ProcessState(**asdict(each)) for each in view.processes],
    )
    if view.order is not None:
        state.order.CopyFrom(control_pb2.OrderState(**asdict(view.order)))
    return state


def cluster_from_proto(state: control_pb2.ClusterState) -> ClusterView:
    order = state.order
    return ClusterView(
        state.controller,
        state.state,
        state.restarts,
        state.draft_restarts,
        tuple(_process_from_proto(each) for each in state.processes),
        order=OperationView(order.what, order.state, order.detail)
        if state.HasField("order")
        else None,
    )


def _process_from_proto(found: control_pb2.ProcessState) -> ProcessView:
    values = {name: getattr(found, name) for name in found.DESCRIPTOR.fields_by_name}
    return ProcessView(**(values | {"gpu_ids": tuple(found.gpu_ids)}))
