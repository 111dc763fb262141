"""Progress of a run: a live table in a terminal, one line per shift elsewhere."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from outrider.loadtest.clients.process import RecordBatch, RequestSummary
from outrider.loadtest.clients.shifts import LoadSpec
from outrider.loadtest.plan import ArmSpec
from outrider.loadtest.runs import ShiftRecord

_RECENT = 2000  # finished requests that live figures cover
_ROWS = 12  # finished shifts kept in the live table
_REFRESH_PER_S = 4


class View(Protocol):
    """Displays progress; has no effect on the run."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def say(self, text: str) -> None:
        """Prints one line."""

    def shift_begins(self, arm: ArmSpec, load: LoadSpec, block: int) -> None: ...

    def ended(self, client: int, batch: RecordBatch) -> None: ...

    def shift_ends(self, shift: ShiftRecord) -> None: ...


@dataclass(slots=True)
class _LiveShift:
    """Live counts of the current shift."""

    title: str
    start_s: float
    sent: dict[int, int] = field(default_factory=dict)
    in_flight: dict[int, int] = field(default_factory=dict)
    ok: int = 0
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    recent: deque[RequestSummary] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def take(self, client: int, batch: RecordBatch) -> None:
        self.sent[client], self.in_flight[client] = batch.sent, batch.in_flight
        for summary in batch.summaries:
            self.recent.append(summary)
            self.tokens += summary.output_tokens
            if summary.is_ok:
                self.ok += 1
            else:
                self.errors[summary.error or "?"] += 1

    @property
    def first_token_ms(self) -> float | None:
        firsts = [g.first_token_s for g in self.recent if g.first_token_s is not None]
        return median(firsts) * 1e3 if firsts else None

    def cells(self) -> list[str]:
        """Figures since the start of the shift, warm-up included."""
        seconds = max(time.monotonic() - self.start_s, 1e-9)
        first = self.first_token_ms
        failed = sum(self.errors.values())
        return [
            self.title,
            str(sum(self.sent.values())),
            str(self.ok),
            str(failed) + (f" ({self.errors.most_common(1)[0][0]})" if failed else ""),
            str(sum(self.in_flight.values())),
            f"{self.tokens / seconds:,.0f}",
            "-" if first is None else f"{first:,.0f} ms",
        ]


_HEADINGS = ("shift", "sent", "ok", "failed", "in flight", "tokens/s", "first token p50", "client")


class TerminalView:
    """A table redrawn four times a second, with the last finished shifts above the current one."""

    def __init__(self, total: int | None, console: Console) -> None:
        self._console = console
        self._total = total
        self._rows: deque[list[str]] = deque(maxlen=_ROWS)
        self._now: _LiveShift | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(
                "{task.completed} of {task.total} shifts" if total else "{task.completed} shifts"
            ),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("measuring", total=self._total)
        self._live = Live(
            console=console, refresh_per_second=_REFRESH_PER_S, get_renderable=self._draw
        )

    def __enter__(self) -> TerminalView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.console.print(Text(text, style="dim"))

    def shift_begins(self, arm: ArmSpec, load: LoadSpec, block: int) -> None:
        self._now = _LiveShift(_title(arm.name, load.name, block), time.monotonic())

    def ended(self, client: int, batch: RecordBatch) -> None:
        if self._now is not None:
            self._now.take(client, batch)

    def shift_ends(self, shift: ShiftRecord) -> None:
        if self._now is not None:
            self._rows.append([*self._now.cells(), _client_short(shift)])
        self._now = None
        if shift.is_discarded and self._total is not None:
            self._total += 1
            self._progress.update(self._task, total=self._total)
        self._progress.advance(self._task)

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False, expand=False)
        for name in _HEADINGS:
            table.add_column(name, justify="left" if name in ("shift", "client") else "right")
        for row in self._rows:
            table.add_row(*map(Text, row), style="dim")
        if self._now is not None:
            table.add_row(*map(Text, self._now.cells()), style="bold")
        return Group(table, self._progress)


class PlainView:
    """One line per shift, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._now: _LiveShift | None = None

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def shift_begins(self, arm: ArmSpec, load: LoadSpec, block: int) -> None:
        self._now = _LiveShift(_title(arm.name, load.name, block), time.monotonic())

    def ended(self, client: int, batch: RecordBatch) -> None:
        if self._now is not None:
            self._now.take(client, batch)

    def shift_ends(self, shift: ShiftRecord) -> None:
        if self._now is not None:
            cells = zip(_HEADINGS[1:], self._now.cells()[1:], strict=False)
            words = ", ".join(f"{name} {value}" for name, value in cells)
            self.say(f"{self._now.title}: {words}, client {_client_words(shift)}")


def make_view(total: int | None, console: Console) -> View:
    """A view of `total` shifts; None if the number is unknown."""
    return TerminalView(total, console) if console.is_terminal else PlainView(console)


def _title(arm: str, load: str, block: int) -> str:
    return f"{arm}, {load}, block {block + 1}"


def _client_short(shift: ShiftRecord) -> str:
    """Client lag in one line, for a table column."""
    late = f"{shift.loop_delay_p99_ms:.0f} ms late"
    if shift.is_discarded:
        return late + ", again"
    return late + (", SLOW" if shift.is_client_bound else "")


def _client_words(shift: ShiftRecord) -> str:
    words = f"late by {shift.loop_delay_p99_ms:.1f} ms (p99), {shift.client_cpu_s:.1f} s of CPU"
    if shift.is_discarded:
        return words + ": the client was the bottleneck, measured again"
    return words + (": THE CLIENT WAS THE BOTTLENECK" if shift.is_client_bound else "")
