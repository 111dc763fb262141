"""Who is next, and whose time is up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

from outrider.scheduler.request import Request, State

_Order: TypeAlias = tuple[float, ...]
_FEW = 16  # entries that are not worth clearing out


class _LazyHeap:
    """Requests by an order that never changes. One that is not to come up any more stays until it
    does, or until such entries are more than half of all: so taking one out is cheap, and memory
    follows what is really there."""

    __slots__ = ("_heap", "_is_wanted", "_num_stale")

    def __init__(self, is_wanted: Callable[[Request], bool]) -> None:
        self._heap: list[tuple[_Order, Request]] = []
        self._is_wanted = is_wanted
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_stale

    @property
    def num_entries(self) -> int:
        """With those that are not to come up any more."""
        return len(self._heap)

    def push(self, order: _Order, request: Request) -> None:
        heapq.heappush(self._heap, (order, request))

    def forget_one(self) -> None:
        """A request in the heap is not wanted any more."""
        self._num_stale += 1
        if self._num_stale > len(self._heap) // 2 and len(self._heap) > _FEW:
            self._heap = [entry for entry in self._heap if self._is_wanted(entry[1])]
            heapq.heapify(self._heap)
            self._num_stale = 0

    def peek(self) -> tuple[_Order, Request] | None:
        while self._heap and not self._is_wanted(self._heap[0][1]):
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return self._heap[0] if self._heap else None

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]


class WaitingQueue:
    """Requests ordered by `priority * aging_s + arrival`, smallest first.

    Within a priority that is longest wait first. Across priorities a request gains one level for
    every `aging_s` it waits, so nothing starves; and the key never changes, so a heap will do.
    """

    def __init__(self) -> None:
        self._heap = _LazyHeap(lambda request: request.state is State.WAITING)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def num_entries(self) -> int:
        return self._heap.num_entries

    def push(self, request: Request) -> None:
        self._heap.push(request.key, request)

    def forget_one(self) -> None:
        """A waiting request left this state without being popped."""
        self._heap.forget_one()

    def peek(self) -> Request | None:
        found = self._heap.peek()
        return None if found is None else found[1]

    def pop(self) -> Request:
        return self._heap.pop()


class Deadlines:
    """Requests with a time limit, nearest first."""

    def __init__(self) -> None:
        self._heap = _LazyHeap(lambda request: request.state is not State.FINISHED)

    @property
    def num_entries(self) -> int:
        return self._heap.num_entries

    def watch(self, request: Request) -> None:
        if request.deadline_s is not None:
            request.is_watched = True
            self._heap.push((request.deadline_s, *request.key), request)

    def forget(self, request: Request) -> None:
        """A request has finished, unless it did so because `expired` named it."""
        if request.is_watched:
            request.is_watched = False
            self._heap.forget_one()

    def expired(self, now_s: float) -> list[Request]:
        late: list[Request] = []
        while (first := self._heap.peek()) is not None and first[0][0] <= now_s:
            request = self._heap.pop()
            request.is_watched = False
            late.append(request)
        return late
