"""What a step wrote, on its way to the host while the next step runs."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Marks the stages of a step on the stream, and copies its outcomes behind them."""

    def __init__(self, outcomes: Tensor) -> None:
        self._source = outcomes
        self._host: Tensor | None = None
        self._marks = [_mark()] if outcomes.is_cuda else []

    def mark_drafted(self) -> None:
        if self._source.is_cuda:
            self._marks.append(_mark())

    def enqueue(self, num_rows: int) -> None:
        """Have the first rows copied once the step has ended; nobody waits here."""
        rows = self._source[:num_rows]
        if not rows.is_cuda:
            self._host = rows.clone()
            return
        self._host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self._host.copy_(rows, non_blocking=True)
        self._marks.append(_mark())

    def rows(self) -> list[list[int]]:
        """The outcomes; waits for them."""
        assert self._host is not None
        if self._marks:
            self._marks[-1].synchronize()
        found: list[list[int]] = self._host.tolist()
        return found

    def seconds(self) -> tuple[float, float]:
        """How long drafting and verification took; only behind `rows`."""
        if not self._marks:
            return 0.0, 0.0
        begin, drafted, end = self._marks
        return begin.elapsed_time(drafted) / 1e3, drafted.elapsed_time(end) / 1e3


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
