"""What a gateway and its keeper, whoever starts it or counts it among its own, say to each other.

The gateway dials in. The keeper begins with a `Welcome`, which is all a gateway has to know; then
either says what it has to say. Nothing here supposes that both are on one host. A gateway whose
keeper is gone finishes what it has in hand and ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.links.cluster_view import ClusterView
from outrider.links.speculation import SpeculationChange


@dataclass(frozen=True, slots=True)
class Welcome:
    """Keeper to gateway, first of all."""

    settings: dict[str, Any]  # those of the server and of logs, by path, keys included
    num_processes: int  # that share the ports and the limits
    is_draining: bool  # new requests are refused from the beginning
    speculation: SpeculationChange  # made so far, for every engine to come


@dataclass(frozen=True, slots=True)
class Listening:
    """Gateway to keeper: clients reach it there."""

    http_address: str
    grpc_address: str


@dataclass(frozen=True, slots=True)
class CannotServe:
    """Gateway to keeper, its last words: why it does not serve."""

    message: str


@dataclass(frozen=True, slots=True)
class Load:
    """Gateway to keeper, whenever it changes state and now and then: how it fares."""

    state: str
    num_active: int  # requests in hand


# -- questions of a gateway -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindEngine:
    """Gateway to keeper: where is the engine. Answered once it is anywhere."""

    query: int


@dataclass(frozen=True, slots=True)
class EngineFound:
    """Keeper to gateway. With an `error` there is none, nor will there be one."""

    query: int
    address: str
    secret: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class ViewCluster:
    """Gateway to keeper: how do the processes of the server fare."""

    query: int


@dataclass(frozen=True, slots=True)
class ClusterViewed:
    """Keeper to gateway: the answer; None if nobody can tell."""

    query: int
    view: ClusterView | None


# -- what one process hears and all must do ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrainAll:
    """Gateway to keeper: an operator wants every process to refuse new requests."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Keeper to gateway: refuse new requests from now on."""


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Gateway to keeper: an operator wants a request ended, wherever it is. Answered by `Aborted`
    with the sum over all processes that answer in time."""

    query: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Keeper to gateway: end this request if it is yours. Answered by `Aborted`."""

    query: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """Either way: the answer."""

    query: int
    num_ended: int


@dataclass(frozen=True, slots=True)
class Speculating:
    """Either way: what an operator has changed of speculation, for every engine to come."""

    change: SpeculationChange


# -- the keeper's own -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NumProcesses:
    """Keeper to gateway: so many share the ports and the limits now."""

    count: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Keeper to gateway: give running requests so many seconds, then end."""

    drain_s: float
