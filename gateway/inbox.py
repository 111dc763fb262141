"""The queue of a session's unread events, the engine's updates among them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from outrider.errors import OutriderError
from outrider.gateway.routing.engine_link import EngineLost, Event
from outrider.links.gateway_messages import SubmitRefused
from outrider.scheduler.types import FinishReason, RequestUpdate


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The event that ends a late request."""


@dataclass(frozen=True, slots=True)
class QueueTimeout:
    """The event that ends a request which has no token yet."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request was ended by an operator or by the server's stop."""

    error: OutriderError


OtherEvent: TypeAlias = SubmitRefused | EngineLost | DeadlinePassed | QueueTimeout | RequestEnded
_Text = TypeVar("_Text")


class Inbox:
    """Events in order of arrival. `num_unread` counts tokens, each once per log-probability."""

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
        """Wait for an event."""
        while not self._events:
            self._arrival.clear()
            await self._arrival.wait()

    def take_updates(self, running: Mapping[int, _Text]) -> dict[_Text, list[RequestUpdate]]:
        """All updates before the next event of another kind, by text; updates of handles that do
        not run are dropped."""
        found: dict[_Text, list[RequestUpdate]] = {}
        while self._events and isinstance(update := self._events[0], RequestUpdate):
            if found and not is_normal(update.finish_reason):
                break  # the reader gets the updates before it first
            self._events.popleft()
            self.num_unread -= _size_of(update)
            text = running.get(update.sample_id.handle)
            if text is not None:
                found.setdefault(text, []).append(update)
        return found

    def take_other(self) -> OtherEvent | None:
        """The next event, unless it is an update."""
        if not self._events or isinstance(event := self._events[0], RequestUpdate):
            return None
        self._events.popleft()
        return event


def is_normal(reason: FinishReason | None) -> bool:
    """Whether a text continues or ended by stop or length."""
    return reason in (None, FinishReason.STOP, FinishReason.LENGTH)


def _size_of(update: RequestUpdate) -> int:
    if not update.logprobs and not update.prompt_logprobs:
        return len(update.token_ids)
    tops = (len(found.top) for found in (*update.logprobs, *update.prompt_logprobs))
    return len(update.token_ids) + sum(tops)


async def first_of(*events: asyncio.Event) -> None:
    """Wait until any of them is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
