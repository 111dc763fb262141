"""Standby processes that take over when a process of a replica is lost (`cluster.standby`).

A spare has its libraries imported already, which saves seconds. It reserves no resources of its
bundle, which the running process uses. It ends with the controller that made it, and with the
placement group.

Spares are optional: if none is ready or it does not answer, a new process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from outrider.cluster.ray.actors import ProcessPlace
from outrider.engine.launch.child import STANDBY_AFTER_S
from ray.exceptions import RayError

logger = logging.getLogger(__name__)

_BEGIN_S = 120.0  # then the node has no resources for it
_ANSWER_S = 3.0


@dataclass(frozen=True, slots=True)
class ProcessSlot:
    """The place of one process in a replica; a restarted process fills the same slot."""

    role: str
    rank: int
    group: Any  # a placement group; another group makes another slot
    begin: Callable[[], Any]  # starts an actor
    begin_spare: Callable[[], Any]  # starts a standby actor
    take_over_args: tuple[Any, ...] = ()  # for a spare

    @property
    def key(self) -> tuple[str, int]:
        return self.role, self.rank


@dataclass(frozen=True, slots=True)
class _Standby:
    group: Any
    actor: asyncio.Task[Any]  # None if there is none


class Spares:
    """The spares of one replica's placement. `fill` each slot, `prepare` once the replica serves,
    `close` in the end."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._standbys: dict[tuple[str, int], _Standby] = {}
        self._last: dict[tuple[str, int], ProcessPlace] = {}  # of each slot, alive or not

    async def fill(self, slot: ProcessSlot) -> tuple[Any, ProcessPlace]:
        """Fill a slot with its spare, else with a new actor. `RayError` if it cannot be started."""
        # Wait for the previous process only once: later its pid may be reused.
        before = self._last.pop(slot.key, None)
        actor = self._take(slot)
        place = None
        if actor is not None and before is not None:
            place = await _take_over(actor, before, slot)
        if place is None:
            actor = slot.begin()
            with _killed_on_error(actor):
                place = await actor.describe.remote(before)
        self._last[slot.key] = place
        return actor, place

    def prepare(self, slots: Iterable[ProcessSlot]) -> None:
        """Start spares for these slots, after a delay."""
        if self._enabled:
            for slot in slots:
                self._discard(slot.key)
                standby = asyncio.create_task(_start_spare(slot))
                self._standbys[slot.key] = _Standby(slot.group, standby)

    def close(self) -> None:
        for key in list(self._standbys):
            self._discard(key)

    def _take(self, slot: ProcessSlot) -> Any:
        """The spare of a slot; None if there is none."""
        standby = self._standbys.get(slot.key)
        if standby is None or not standby.actor.done() or standby.group is not slot.group:
            self._discard(slot.key)
            return None
        del self._standbys[slot.key]
        return standby.actor.result()

    def _discard(self, key: tuple[str, int]) -> None:
        standby = self._standbys.pop(key, None)
        if standby is None or standby.actor.cancel() or standby.actor.cancelled():
            return
        if (actor := standby.actor.result()) is not None:
            ray.kill(actor)


async def _start_spare(slot: ProcessSlot) -> Any:
    """Start a spare after a delay; None if the node lacks resources for it."""
    await asyncio.sleep(STANDBY_AFTER_S)
    try:
        actor = slot.begin_spare()
        with _killed_on_error(actor):
            async with asyncio.timeout(_BEGIN_S):
                await actor.__ray_ready__.remote()
            actor.warm.remote()
    except Exception as error:  # spares are optional
        logger.warning("no spare for %s rank %d: %s", slot.role, slot.rank, _reason(error))
        return None
    return actor


async def _take_over(actor: Any, before: ProcessPlace, slot: ProcessSlot) -> ProcessPlace | None:
    """Have a spare take over; None if it has ended or hangs."""
    try:
        with _killed_on_error(actor):
            async with asyncio.timeout(_ANSWER_S):
                await actor.__ray_ready__.remote()
            place: ProcessPlace = await actor.take_over.remote(before, *slot.take_over_args)
    except (RayError, TimeoutError) as error:
        reason = _reason(error)
        logger.warning("the spare of %s rank %d is lost: %s", slot.role, slot.rank, reason)
        return None
    return place


def _reason(error: Exception) -> str:
    """The last line of the message; Ray's traceback comes first."""
    return str(error).strip().rpartition("\n")[2] or "it does not answer"


@contextlib.contextmanager
def _killed_on_error(actor: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        ray.kill(actor)
        raise
