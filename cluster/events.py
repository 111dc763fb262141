"""What happened to a server, as lines for whoever watches it start and run."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from outrider.stages import StageReporter


class Kind(StrEnum):
    """What a line is about."""

    STAGE = "stage"  # a start is getting on
    TROUBLE = "trouble"  # something was lost
    REPAIR = "repair"  # it is back
    LOG = "log"  # another process's own words


@dataclass(frozen=True, slots=True)
class Event:
    """One line."""

    kind: Kind
    text: str


Say: TypeAlias = Callable[[Event], None]


def stage_reporter(say: Say) -> StageReporter:
    """For an event loop: what takes long within it is said there."""
    loop = asyncio.get_running_loop()

    def report(words: str) -> None:
        loop.call_soon_threadsafe(say, Event(Kind.STAGE, words))

    return StageReporter(report)


def quote(name: str, lines: Iterable[str]) -> list[Event]:
    """What the process of that name wrote."""
    return [Event(Kind.LOG, f"{name} | {line}") for line in lines]


@dataclass(frozen=True, slots=True)
class Bookmark:
    """How far a reader is in which journal."""

    journal: str = ""
    num_read: int = 0
    num_wakes: int = 0  # heard of, with or without lines


@dataclass(frozen=True, slots=True)
class Pages:
    """What followed a bookmark, and the bookmark after it."""

    events: list[Event]
    bookmark: Bookmark


class Journal:
    """Lines in order. Readers bring their bookmark and wait for more.

    Belongs to one event loop; see `say_from_thread` for the others.
    """

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._events: list[Event] = []
        self._num_wakes = 0
        self._arrival = asyncio.Event()

    def say(self, event: Event) -> None:
        self._events.append(event)
        self.wake()

    @property
    def bookmark(self) -> Bookmark:
        """After all there is."""
        return Bookmark(self._id, len(self._events), self._num_wakes)

    def wake(self) -> None:
        """Readers that wait, or come back: there may be other news than lines."""
        self._num_wakes += 1
        self._arrival.set()
        self._arrival = asyncio.Event()

    def say_from_thread(self, event: Event, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self.say, event)

    async def read(self, bookmark: Bookmark, timeout_s: float) -> Pages:
        """What followed; nothing if nothing did in that time.

        A bookmark of another journal, that of a process which is gone, means the beginning.
        """
        if bookmark.journal != self._id:
            bookmark = Bookmark(self._id)
        # Whatever woke readers while this one was on its way is news to it.
        if bookmark.num_wakes == self._num_wakes:
            arrival = self._arrival
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await arrival.wait()
        return Pages(self._events[bookmark.num_read :], self.bookmark)
