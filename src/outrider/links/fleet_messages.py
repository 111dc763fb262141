"""Messages between a gateway and a controller.

The gateway connects. The controller begins with a `Welcome` and its `ReplicaTable`; after that both
send at any time. The two may be on different hosts.

A local gateway is started by the controller, gets its settings from it and ends with it. A remote
one has its own settings, may know several controllers, and reconnects when it loses one. Both get
the same messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from outrider.links.cluster_view import ClusterView
from outrider.links.speculation import SpeculationChange
from outrider.links.tags import message

# The revision of these messages; a remote gateway sends it as the rank of its `Hello`. It was 0
# before the first added field.
REVISION = 1


@message("Welcome")
@dataclass(frozen=True, slots=True)
class Welcome:
    """Controller to gateway, its first message."""

    controller: str  # its unique name
    # Server and log settings by path, API keys included; empty for a remote gateway.
    settings: dict[str, Any]
    num_processes: int  # that share the limits
    is_draining: bool  # new requests are refused from the start
    speculation: SpeculationChange  # made so far, to apply to every new engine


@message("Listening")
@dataclass(frozen=True, slots=True)
class GatewayListening:
    """Gateway to controller: its addresses for clients."""

    http_address: str
    grpc_address: str


@message("CannotServe")
@dataclass(frozen=True, slots=True)
class GatewayFailed:
    """Gateway to controller, its last message: why it does not serve."""

    message: str


@message("Load")
@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """Gateway to controller, periodically and on every change of state."""

    state: str
    num_active: int  # active requests


# -- where the engines are --------------------------------------------------------------------


class ReplicaState(StrEnum):
    """Which requests a replica takes."""

    STARTING = "starting"  # none, for now
    SERVING = "serving"
    DRAINING = "draining"  # no new ones; active ones finish


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """One engine; a restarted one keeps its name."""

    name: str  # unique in the controller
    addresses: tuple[str, ...]  # equivalent; none while it does not run
    state: ReplicaState


@message("Replicas")
@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """Controller to gateway, at first and on every change: all replicas. Requests of a lost replica
    continue on another."""

    places: tuple[ReplicaPlace, ...]


# -- queries of a gateway -----------------------------------------------------------------------


@message("ViewCluster")
@dataclass(frozen=True, slots=True)
class ViewCluster:
    """Gateway to controller: asks for the state of the server's processes."""

    query: int


@message("ClusterViewed")
@dataclass(frozen=True, slots=True)
class ViewClusterResult:
    """Controller to gateway: the answer; None if it is unknown."""

    query: int
    view: ClusterView | None


# -- orders that one process gets and all must execute ------------------------------------------


@message("DrainAll")
@dataclass(frozen=True, slots=True)
class DrainAll:
    """Gateway to controller: an operator drains all gateways."""


@message("Drain")
@dataclass(frozen=True, slots=True)
class Drain:
    """Controller to gateway: refuse new requests from now on."""


@message("AbortAll")
@dataclass(frozen=True, slots=True)
class AbortAll:
    """Gateway to controller: an operator aborts a request, wherever it is. Answered by
    `AbortResult` with the sum over all processes that answer in time."""

    query: int
    request_id: str


@message("Abort")
@dataclass(frozen=True, slots=True)
class Abort:
    """Controller to gateway: abort this request if it is yours. Answered by `AbortResult`."""

    query: int
    request_id: str


@message("Aborted")
@dataclass(frozen=True, slots=True)
class AbortResult:
    """Either way: the answer."""

    query: int
    num_ended: int


@message("Speculating")
@dataclass(frozen=True, slots=True)
class SpeculationChanged:
    """Either way: an operator's change of speculation, to apply to every new engine too."""

    change: SpeculationChange


@message("ScaleTo")
@dataclass(frozen=True, slots=True)
class ScaleTo:
    """Gateway to controller: an operator scales to `num_replicas`. Answered by `OperationResult`
    once the change has begun."""

    query: int
    num_replicas: int


@message("RollOut")
@dataclass(frozen=True, slots=True)
class RollOut:
    """Gateway to controller: an operator rolls out changed settings, replica by replica. If only
    the draft's settings change, only the drafts are replaced. Answered by `OperationResult` as
    soon as the rollout has begun."""

    query: int
    settings: dict[str, Any]


@message("Ordered")
@dataclass(frozen=True, slots=True)
class OperationResult:
    """Controller to gateway: the answer to an order. With an `error` nothing is done."""

    query: int
    error: str = ""


# -- hosts that end ---------------------------------------------------------------------------


@message("Leaving")
@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """Node to controller, its only message: this host ends in `limit_s`. Answered by
    `NodeDrained`."""

    hosts: tuple[str, ...]  # addresses it is known by
    limit_s: float


@message("Left")
@dataclass(frozen=True, slots=True)
class NodeDrained:
    """Controller to node: no replica runs there any more; with an `error` one may still."""

    error: str = ""


# -- the controller's own -------------------------------------------------------------------------


@message("NumProcesses")
@dataclass(frozen=True, slots=True)
class NumProcesses:
    """Controller to gateway: the number of gateways that share ports and limits."""

    count: int


@message("Stop")
@dataclass(frozen=True, slots=True)
class StopGateway:
    """Controller to gateway: end, after at most `drain_s` for running requests."""

    drain_s: float
