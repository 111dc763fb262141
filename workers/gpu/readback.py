"""Reads back a step's outcomes while the next step runs, and times its stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.kernels.gpu.accept import OutcomeColumn
from outrider.scheduler.types import NO_TOKEN, RowPlan, RowVerdict

_BASE_LEN, _NUM_ACCEPTED = OutcomeColumn.BASE_LEN, OutcomeColumn.NUM_ACCEPTED
_DEPTH, _TOKENS = OutcomeColumn.DEPTH, OutcomeColumn.TOKENS


class _HostEvent:
    """Without a GPU: the host did the work, so all of it has ended."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


StreamEvent: TypeAlias = "torch.cuda.Event | _HostEvent"
"""A point in the stream of the device's work."""


def record_event(device: torch.device) -> StreamEvent:
    """After everything enqueued so far."""
    if device.type != "cuda":
        return _HostEvent()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: StreamEvent, end: StreamEvent) -> float:
    """Valid once `end` has completed."""
    if isinstance(begin, _HostEvent) or isinstance(end, _HostEvent):
        assert isinstance(begin, _HostEvent) and isinstance(end, _HostEvent)
        return end.at_s - begin.at_s
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1e3


_PLACES = 4  # more than there are steps in flight


class PinnedRing:
    """Host memory that copies of a tensor go to, in turn: allocating pinned memory may wait for
    the device."""

    def __init__(self, source: Tensor) -> None:
        self._places = [
            torch.zeros(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            for _ in range(_PLACES)
        ]
        self._next = 0

    def take(self) -> Tensor:
        """Valid until as many more were taken as there are."""
        self._next = (self._next + 1) % _PLACES
        return self._places[self._next]


class Readback:
    """Records events at the stages of a step, and copies its outcomes after them."""

    def __init__(self, outcomes: Tensor, places: PinnedRing) -> None:
        self._source = outcomes
        self._place = places.take()
        self._host: Tensor | None = None
        self._events = [record_event(outcomes.device)]

    def record_drafted(self) -> None:
        self._events.append(record_event(self._source.device))

    def enqueue(self, num_rows: int) -> None:
        """Enqueue the copy of the first rows; does not block."""
        self._host = self._place[:num_rows]
        self._host.copy_(self._source[:num_rows], non_blocking=True)
        self._events.append(record_event(self._source.device))

    @property
    def is_done(self) -> bool:
        return self._events[-1].query()

    def records(self) -> Tensor:
        """Wait for the outcomes and return them, on the host."""
        assert self._host is not None
        self._events[-1].synchronize()
        return self._host

    def seconds(self) -> tuple[float, float]:
        """Drafting and verification time; valid after `records`."""
        begin, drafted, end = self._events
        return seconds_between(begin, drafted), seconds_between(drafted, end)


def row_verdict(row: RowPlan, outcome: Sequence[int]) -> RowVerdict:
    """The verdict of a row that samples, from its record."""
    base_len, accepted = outcome[_BASE_LEN], outcome[_NUM_ACCEPTED]
    tokens = tuple(outcome[_TOKENS : _TOKENS + accepted + 1])
    is_broken = tokens[-1] == NO_TOKEN
    if is_broken:
        tokens = (*tokens[:-1], 0)  # as on the device
    return RowVerdict(
        *(row.row, row.generation, base_len, row.depth, outcome[_DEPTH], accepted, tokens),
        is_broken=is_broken,
    )


def copied_to_host(values: Tensor) -> Tensor:
    """Enqueue a copy, filled once everything enqueued so far has ended; does not block."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host
