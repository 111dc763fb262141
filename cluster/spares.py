"""Who waits beside a replica's processes to take over when they are lost (`cluster.standby`).

A process takes seconds to be there, with its libraries imported; one that waits has that behind
it. It takes none of what its bundle has, which the one beside it uses, and belongs to whoever
made it: it ends with the controller, and with the bundle's placement group.

Nothing depends on one: where none waits, or it does not answer, a process is started as at first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from outrider.cluster.actors import ProcessPlace
from outrider.engine.launch.child import STANDBY_AFTER_S

logger = logging.getLogger(__name__)

_BEGIN_S = 120.0  # then the node has no room for it, or no time
_ANSWER_S = 3.0


@dataclass(frozen=True, slots=True)
class Post:
    """One process of a replica, whoever fills it."""

    role: str
    rank: int
    group: Any  # a placement group; with another one it is another post
    begin: Callable[[], Any]  # an actor for it
    begin_spare: Callable[[], Any]  # one that is to wait for it
    terms: tuple[Any, ...] = ()  # told to a spare when it takes over

    @property
    def key(self) -> tuple[str, int]:
        return self.role, self.rank


@dataclass(frozen=True, slots=True)
class _Waiting:
    group: Any
    actor: asyncio.Task[Any]  # None if there is none


class Spares:
    """Of one replica, for as long as it has its room. `fill` a post, `prepare` when all are filled
    and the replica serves, `close` in the end."""

    def __init__(self, *, are_wanted: bool) -> None:
        self._are_wanted = are_wanted
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._last: dict[tuple[str, int], ProcessPlace] = {}  # who filled it, alive or not

    async def fill(self, post: Post) -> tuple[Any, ProcessPlace]:
        """With whoever waits for it, else with a new actor. `RayError` if it cannot be."""
        # Whoever was before is waited for once: later its number may be another process's.
        before = self._last.pop(post.key, None)
        actor = self._take(post)
        place = None
        if actor is not None and before is not None:
            place = await _taken_over(actor, before, post)
        if place is None:
            actor = post.begin()
            with _killed_if_broken_off(actor):
                place = await actor.describe.remote(before)
        self._last[post.key] = place
        return actor, place

    def prepare(self, posts: Iterable[Post]) -> None:
        """Soon somebody may wait for these; until now nobody has needed to."""
        if self._are_wanted:
            for post in posts:
                self._dismiss(post.key)
                waiting = asyncio.create_task(_begun(post))
                self._waiting[post.key] = _Waiting(post.group, waiting)

    def close(self) -> None:
        for key in list(self._waiting):
            self._dismiss(key)

    def _take(self, post: Post) -> Any:
        """None if nobody waits there."""
        waiting = self._waiting.get(post.key)
        if waiting is None or not waiting.actor.done() or waiting.group is not post.group:
            self._dismiss(post.key)
            return None
        del self._waiting[post.key]
        return waiting.actor.result()

    def _dismiss(self, key: tuple[str, int]) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is None or waiting.actor.cancel() or waiting.actor.cancelled():
            return
        if (actor := waiting.actor.result()) is not None:
            ray.kill(actor)


async def _begun(post: Post) -> Any:
    """An actor that waits, after a while; None if the node does not give one."""
    await asyncio.sleep(STANDBY_AFTER_S)
    try:
        actor = post.begin_spare()
        with _killed_if_broken_off(actor):
            async with asyncio.timeout(_BEGIN_S):
                await actor.__ray_ready__.remote()
            actor.warm.remote()
    except Exception as error:  # nothing depends on it, so whatever it is breaks nothing
        logger.warning("nobody waits for %s rank %d: %s", post.role, post.rank, _told(error))
        return None
    return actor


async def _taken_over(actor: Any, before: ProcessPlace, post: Post) -> ProcessPlace | None:
    """None if it has ended or hangs, and does not take over."""
    try:
        with _killed_if_broken_off(actor):
            async with asyncio.timeout(_ANSWER_S):
                await actor.__ray_ready__.remote()
            place: ProcessPlace = await actor.take_over.remote(before, *post.terms)
    except (RayError, TimeoutError) as error:
        told = _told(error)
        logger.warning("who waited for %s rank %d is lost: %s", post.role, post.rank, told)
        return None
    return place


def _told(error: Exception) -> str:
    """Without the way it took, which Ray tells first."""
    return str(error).strip().rpartition("\n")[2] or "it does not answer"


@contextlib.contextmanager
def _killed_if_broken_off(actor: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        ray.kill(actor)
        raise
