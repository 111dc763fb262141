"""What has come for a session and was not read yet, the engine's updates among it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from outrider.errors import OutriderError
from outrider.gateway.engine_link import EngineLost, Event
from outrider.links.gateway_messages import Refused
from outrider.scheduler.types import FinishReason, RequestUpdate


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The event that ends a late request."""


@dataclass(frozen=True, slots=True)
class WaitedTooLong:
    """The event that ends a request which has no token yet."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Ended:
    """Somebody else than the reader has ended the request."""

    error: OutriderError


OtherEvent: TypeAlias = Refused | EngineLost | DeadlinePassed | WaitedTooLong | Ended
_Text = TypeVar("_Text")


class Inbox:
    """In order of arrival. `num_unread` are tokens, each as often as it has log-probabilities."""

    def __init__(self) -> None:
        self.num_unread = 0
        self._events: deque[Event | OtherEvent] = deque()
        self._arrival = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._events

    def put(self, event: Event | OtherEvent) -> None:
        self._events.append(event)
        self._arrival.set()
        if isinstance(event, RequestUpdate):
            self.num_unread += _size_of(event)

    async def wait(self) -> None:
        """Until something is there."""
        while not self._events:
            self._arrival.clear()
            await self._arrival.wait()

    def take_updates(self, running: Mapping[int, _Text]) -> dict[_Text, list[RequestUpdate]]:
        """All that came before the next event of another kind, by the text they are for; those of
        handles that do not run are dropped."""
        found: dict[_Text, list[RequestUpdate]] = {}
        while self._events and isinstance(update := self._events[0], RequestUpdate):
            if found and not is_well(update.finish_reason):
                break  # what came before it is the reader's
            self._events.popleft()
            self.num_unread -= _size_of(update)
            text = running.get(update.sample_id.handle)
            if text is not None:
                found.setdefault(text, []).append(update)
        return found

    def take_other(self) -> OtherEvent | None:
        """The next event, if it is none of the updates."""
        if not self._events or isinstance(event := self._events[0], RequestUpdate):
            return None
        self._events.popleft()
        return event


def is_well(reason: FinishReason | None) -> bool:
    """Whether a text goes on or has ended as texts do."""
    return reason in (None, FinishReason.STOP, FinishReason.LENGTH)


def _size_of(update: RequestUpdate) -> int:
    if not update.logprobs and not update.prompt_logprobs:
        return len(update.token_ids)
    tops = (len(found.top) for found in (*update.logprobs, *update.prompt_logprobs))
    return len(update.token_ids) + sum(tops)


async def first_of(*events: asyncio.Event) -> None:
    """Until any of them is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
