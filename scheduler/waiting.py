"""The waiting queue and deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TypeAlias

from outrider.scheduler.request import Request, RequestState
from outrider.scheduler.tenants import Tenant

_Order: TypeAlias = tuple[float, ...]
_Rank: TypeAlias = tuple[int, tuple[float, int]]
_FEW = 16  # entries not worth compacting


class _LazyHeap:
    """Requests by an order that never changes. A removed entry stays until it is popped, or until
    stale entries are more than half of all: removal is cheap, and memory stays proportional to the
    live entries."""

    __slots__ = ("_heap", "_is_live", "_num_stale")

    def __init__(self, is_live: Callable[[Request], bool]) -> None:
        self._heap: list[tuple[_Order, Request]] = []
        self._is_live = is_live
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_stale

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._heap if self._is_live(request))

    @property
    def num_entries(self) -> int:
        """Stale ones included."""
        return len(self._heap)

    def push(self, order: _Order, request: Request) -> None:
        heapq.heappush(self._heap, (order, request))

    def forget_one(self) -> None:
        """A request in the heap has become stale."""
        self._num_stale += 1
        if self._num_stale > len(self._heap) // 2 and len(self._heap) > _FEW:
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
            self._num_stale = 0

    def peek(self) -> tuple[_Order, Request] | None:
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return self._heap[0] if self._heap else None

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]


class WaitingQueue:
    """Fair among tenants, and by `priority * aging_s + arrival` among the requests of one.

    The next request is the first of the tenant with the least service, where a priority is worth
    `priority_tokens` of service: it puts a tenant ahead of others once, by a bounded amount, so
    none starves. Within a tenant it is first come, first served within a priority. Across
    priorities a request gains one level for every `aging_s` it waits; the key never changes, so a
    heap will do.

    The heap of tenants is reordered lazily, at its top: service grows with every step, which moves
    a tenant back, and what moves one forward adds an entry.
    """

    def __init__(self, priority_tokens: int = 0) -> None:
        self.now_s = 0.0  # set by every plan
        self._priority_tokens = priority_tokens
        self._heaps: dict[Tenant, _LazyHeap] = {}  # none of them empty
        self._ranks: list[tuple[_Rank, Tenant]] = []  # a heap
        self._rank_of: dict[Tenant, _Rank] = {}  # others of the tenant in the heap are stale
        self._last: Tenant | None = None  # that stopped waiting
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_entries(self) -> int:
        """Stale ones included."""
        return sum(heap.num_entries for heap in self._heaps.values())

    @property
    def num_ranks(self) -> int:
        """Entries of tenants in memory, stale ones included."""
        return len(self._ranks)

    def push(self, request: Request) -> None:
        tenant = request.tenant
        heap = self._heaps.get(tenant)
        if heap is None:
            self._lift(tenant)
            heap = self._heaps[tenant] = _LazyHeap(_is_waiting)
            if not tenant.num_running:
                tenant.without_row_s = self.now_s
        heap.push(request.key, request)
        self._num_waiting += 1
        self._rank(tenant)

    def forget(self, request: Request) -> None:
        """A waiting request left this state without being popped."""
        self._num_waiting -= 1
        self._heaps[request.tenant].forget_one()
        self._settle(request.tenant)

    def peek(self) -> Request | None:
        while self._ranks:
            rank, tenant = self._ranks[0]
            if self._rank_of.get(tenant) != rank:
                heapq.heappop(self._ranks)
                continue
            first = self._heaps[tenant].peek()
            assert first is not None
            now = (self.standing(first[1]), first[1].key)
            if now == rank:
                return first[1]
            self._rank_of[tenant] = now
            heapq.heapreplace(self._ranks, (now, tenant))
        return None

    def pop(self, first: Request) -> None:
        """Remove the request that `peek` returned, which may have its row already."""
        popped = self._heaps[first.tenant].pop()
        assert popped is first
        self._num_waiting -= 1
        self._settle(first.tenant)

    def newest(self, tenant: Tenant) -> Request | None:
        """The tenant's latest request that may be displaced."""
        heap = self._heaps.get(tenant)
        found = () if heap is None else (each for each in heap if each.may_be_displaced)
        return max(found, key=lambda each: each.key[1], default=None)

    def _lift(self, tenant: Tenant) -> None:
        """The tenant begins to wait: unused service is not owed to it."""
        first = self.peek()
        if first is not None:
            # Not above its standing, or its priority would count again for each new waiter.
            level = min(first.tenant.service, self.standing(first))
        else:
            level = 0 if self._last is None else self._last.service
        tenant.service = max(tenant.service, level)

    def _settle(self, tenant: Tenant) -> None:
        """One of the tenant's requests left the queue."""
        if self._heaps[tenant]:
            self._rank(tenant)
            return
        del self._heaps[tenant], self._rank_of[tenant]
        self._last = tenant

    def _rank(self, tenant: Tenant) -> None:
        """Push the tenant's rank if it improved: its first request may have changed."""
        first = self._heaps[tenant].peek()
        assert first is not None
        rank, known = (self.standing(first[1]), first[1].key), self._rank_of.get(tenant)
        if known is not None and known <= rank:
            return
        self._rank_of[tenant] = rank
        heapq.heappush(self._ranks, (rank, tenant))
        if len(self._ranks) > 2 * len(self._heaps) + _FEW:
            self._ranks = [(rank, tenant) for tenant, rank in self._rank_of.items()]
            heapq.heapify(self._ranks)

    def standing(self, request: Request) -> int:
        """Its tenant's service, shifted by the request's priority; the least comes first."""
        return request.tenant.service + request.spec.priority * self._priority_tokens


def _is_waiting(request: Request) -> bool:
    return request.state is RequestState.WAITING


class Deadlines:
    """Requests with a time limit, nearest first."""

    def __init__(self) -> None:
        self._heap = _LazyHeap(lambda request: request.state is not RequestState.FINISHED)

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
