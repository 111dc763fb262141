"""The events of a server's start and run, as lines for its operator."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from outrider.progress_stages import StageReporter


class EventKind(StrEnum):
    """What a line is about."""

    STAGE = "stage"  # progress of a start
    TROUBLE = "trouble"  # a loss or failure
    REPAIR = "repair"  # a recovery
    LOG = "log"  # output of another process


@dataclass(frozen=True, slots=True)
class Event:
    """One line."""

    kind: EventKind
    text: str


Say: TypeAlias = Callable[[Event], None]


def stage_reporter(say: Say) -> StageReporter:
    """Reports stages that take long, on the current event loop."""
    loop = asyncio.get_running_loop()

    def report(words: str) -> None:
        loop.call_soon_threadsafe(say, Event(EventKind.STAGE, words))

    return StageReporter(report)


def quote(name: str, lines: Iterable[str]) -> list[Event]:
    """Log lines of the process of that name, as events."""
    return [Event(EventKind.LOG, f"{name} | {line}") for line in lines]


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A reader's position in a journal."""

    journal: str = ""
    num_read: int = 0
    num_wakes: int = 0  # wake-ups seen, with or without events


@dataclass(frozen=True, slots=True)
class Pages:
    """The events after a bookmark, and the next bookmark."""

    events: list[Event]
    bookmark: Bookmark


class Journal:
    """An in-memory event log. Readers bring their bookmark and long-poll.

    Belongs to one event loop; other threads use `say_from_thread`.
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
        """The end of the log."""
        return Bookmark(self._id, len(self._events), self._num_wakes)

    def wake(self) -> None:
        """Wake readers without an event: the state they report may have changed."""
        self._num_wakes += 1
        self._arrival.set()
        self._arrival = asyncio.Event()

    def say_from_thread(self, event: Event, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self.say, event)

    async def read(self, bookmark: Bookmark, timeout_s: float) -> Pages:
        """Events after the bookmark; empty after `timeout_s` without any.

        A bookmark of another journal, of a lost process, reads from the beginning.
        """
        if bookmark.journal != self._id:
            bookmark = Bookmark(self._id)
        # Do not wait if a wake-up came while this reader was away.
        if bookmark.num_wakes == self._num_wakes:
            arrival = self._arrival
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await arrival.wait()
        return Pages(self._events[bookmark.num_read :], self.bookmark)
