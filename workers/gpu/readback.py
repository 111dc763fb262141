"""What a step wrote, on its way to the host while the next step runs, and how long it took."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch
from torch import Tensor


class _HostMark:
    """Where the host does the work itself: all before it has ended."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None: ...


Mark: TypeAlias = "torch.cuda.Event | _HostMark"
"""A moment in the order of the device's work."""


def mark(device: torch.device) -> Mark:
    """Behind everything enqueued so far."""
    if device.type != "cuda":
        return _HostMark()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Only once `end` has come."""
    if isinstance(begin, _HostMark) or isinstance(end, _HostMark):
        assert isinstance(begin, _HostMark) and isinstance(end, _HostMark)
        return end.at_s - begin.at_s
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1e3


class Readback:
    """Marks the stages of a step on the stream, and copies its outcomes behind them."""

    def __init__(self, outcomes: Tensor) -> None:
        self._source = outcomes
        self._host: Tensor | None = None
        self._marks = [mark(outcomes.device)]

    def mark_drafted(self) -> None:
        self._marks.append(mark(self._source.device))

    def enqueue(self, num_rows: int) -> None:
        """Have the first rows copied once the step has ended; nobody waits here."""
        self._host = copied_to_host(self._source[:num_rows])
        self._marks.append(mark(self._source.device))

    def rows(self) -> list[list[int]]:
        """The outcomes; waits for them."""
        assert self._host is not None
        self._marks[-1].synchronize()
        found: list[list[int]] = self._host.tolist()
        return found

    def seconds(self) -> tuple[float, float]:
        """How long drafting and verification took; only behind `rows`."""
        begin, drafted, end = self._marks
        return seconds_between(begin, drafted), seconds_between(drafted, end)


def copied_to_host(values: Tensor) -> Tensor:
    """Filled once everything enqueued so far has ended; nobody waits here."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host
