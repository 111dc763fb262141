"""What a gateway and a controller say to each other.

The gateway dials in. The controller begins with a `Welcome` and the `Replicas` it has; then either
says what it has to say. Nothing here supposes that both are on one host.

A gateway is either kept, started by the controller and told its settings by it, and then ends when
the controller is gone; or a guest, which has settings of its own, may know several controllers,
and dials again when one is gone. Both hear the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from outrider.links.cluster_view import ClusterView
from outrider.links.speculation import SpeculationChange
from outrider.links.tags import message

# Of these messages. A guest's `Hello` has it as its rank, which was 0 before fields were added.
REVISION = 1


@message("Welcome")
@dataclass(frozen=True, slots=True)
class Welcome:
    """Controller to gateway, first of all."""

    controller: str  # its name, like no other's
    # Those of the server and of logs, by path, keys included; none for a guest.
    settings: dict[str, Any]
    num_processes: int  # that share the limits
    is_draining: bool  # new requests are refused from the beginning
    speculation: SpeculationChange  # made so far, for every engine to come


@message("Listening")
@dataclass(frozen=True, slots=True)
class Listening:
    """Gateway to controller: clients reach it there."""

    http_address: str
    grpc_address: str


@message("CannotServe")
@dataclass(frozen=True, slots=True)
class CannotServe:
    """Gateway to controller, its last words: why it does not serve."""

    message: str


@message("Load")
@dataclass(frozen=True, slots=True)
class Load:
    """Gateway to controller, whenever it changes state and now and then: how it fares."""

    state: str
    num_active: int  # requests in hand


# -- where the engines are --------------------------------------------------------------------


class ReplicaState(StrEnum):
    """What may be asked of a replica."""

    STARTING = "starting"  # nothing yet, or nothing for now
    SERVING = "serving"
    DRAINING = "draining"  # what it has in hand is finished there, nothing new


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """One engine. One that is started anew has the name of the one before."""

    name: str  # like no other of this controller's
    addresses: tuple[str, ...]  # any will do; none while it is nowhere
    state: ReplicaState


@message("Replicas")
@dataclass(frozen=True, slots=True)
class Replicas:
    """Controller to gateway, at first and whenever they change: all there are. What is on a
    replica that is gone goes on at another."""

    places: tuple[ReplicaPlace, ...]


# -- questions of a gateway -------------------------------------------------------------------


@message("ViewCluster")
@dataclass(frozen=True, slots=True)
class ViewCluster:
    """Gateway to controller: how do the processes of the server fare."""

    query: int


@message("ClusterViewed")
@dataclass(frozen=True, slots=True)
class ClusterViewed:
    """Controller to gateway: the answer; None if nobody can tell."""

    query: int
    view: ClusterView | None


# -- what one process hears and all must do ---------------------------------------------------


@message("DrainAll")
@dataclass(frozen=True, slots=True)
class DrainAll:
    """Gateway to controller: an operator wants every process to refuse new requests."""


@message("Drain")
@dataclass(frozen=True, slots=True)
class Drain:
    """Controller to gateway: refuse new requests from now on."""


@message("AbortAll")
@dataclass(frozen=True, slots=True)
class AbortAll:
    """Gateway to controller: an operator wants a request ended, wherever it is. Answered by
    `Aborted` with the sum over all processes that answer in time."""

    query: int
    request_id: str


@message("Abort")
@dataclass(frozen=True, slots=True)
class Abort:
    """Controller to gateway: end this request if it is yours. Answered by `Aborted`."""

    query: int
    request_id: str


@message("Aborted")
@dataclass(frozen=True, slots=True)
class Aborted:
    """Either way: the answer."""

    query: int
    num_ended: int


@message("Speculating")
@dataclass(frozen=True, slots=True)
class Speculating:
    """Either way: what an operator has changed of speculation, for every engine to come."""

    change: SpeculationChange


@message("ScaleTo")
@dataclass(frozen=True, slots=True)
class ScaleTo:
    """Gateway to controller: an operator wants so many replicas. Answered by `Ordered`, while the
    change is under way."""

    query: int
    num_replicas: int


@message("RollOut")
@dataclass(frozen=True, slots=True)
class RollOut:
    """Gateway to controller: an operator wants every replica replaced, one after the other, with
    these settings changed. If they are of the draft alone, only the drafts are. Answered by
    `Ordered`, while the change is under way."""

    query: int
    settings: dict[str, Any]


@message("Ordered")
@dataclass(frozen=True, slots=True)
class Ordered:
    """Controller to gateway: the answer to an order. With an `error` nothing is done."""

    query: int
    error: str = ""


# -- hosts that end ---------------------------------------------------------------------------


@message("Leaving")
@dataclass(frozen=True, slots=True)
class Leaving:
    """Node to controller, its only message: this host ends in `limit_s`. Answered by `Left`."""

    hosts: tuple[str, ...]  # addresses it is known by
    limit_s: float


@message("Left")
@dataclass(frozen=True, slots=True)
class Left:
    """Controller to node: no replica runs there any more; with an `error` one may."""

    error: str = ""


# -- the controller's own -------------------------------------------------------------------------


@message("NumProcesses")
@dataclass(frozen=True, slots=True)
class NumProcesses:
    """Controller to gateway: so many share the ports and the limits now."""

    count: int


@message("Stop")
@dataclass(frozen=True, slots=True)
class Stop:
    """Controller to gateway: give running requests so many seconds, then end."""

    drain_s: float
