"""Who is next, and whose time is up."""

from __future__ import annotations

import heapq

from outrider.scheduler.request import Request, State


class WaitingQueue:
    """Requests ordered by `priority * aging_s + arrival`, smallest first.

    Within a priority that is longest wait first. Across priorities a request gains one level for
    every `aging_s` it waits, so nothing starves; and the key never changes, so a heap will do.
    Removal is lazy: a request cancelled while waiting is dropped when it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.key, request))
        self._size += 1

    def forget_one(self) -> None:
        """A waiting request left this state without being popped."""
        self._size -= 1

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        self._size -= 1
        return heapq.heappop(self._heap)[1]


class Deadlines:
    """Requests with a time limit, nearest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[float, int], Request]] = []

    def watch(self, request: Request) -> None:
        if request.deadline_s is not None:
            heapq.heappush(self._heap, (request.deadline_s, request.key, request))

    def expired(self, now_s: float) -> list[Request]:
        late: list[Request] = []
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[2]
            if request.state is not State.FINISHED:
                late.append(request)
        return late
