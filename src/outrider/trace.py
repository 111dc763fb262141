"""Records when the parts of a step begin and end, in every process of an engine over ranks.

Only `outrider trace` turns this on: it wraps the methods that do these parts, so other runs pay
nothing. Each process writes its spans into a folder when it ends; `outrider.trace_report` merges
them. Clocks are those of one host.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

FOLDER_VARIABLE = "OUTRIDER_TRACE_FOLDER"
_MAX_SPANS = 100_000


class TraceSpan(NamedTuple):
    """One part of a step in one process; times are of the host's monotonic clock."""

    name: str
    step: int | None
    begin_ns: int
    end_ns: int


class TracedMethod(NamedTuple):
    """A method to wrap, and the name of its spans."""

    owner: object
    method: str
    name: str


class Tracer:
    """The spans of one process."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._spans: deque[TraceSpan] = deque(maxlen=_MAX_SPANS)

    def wrap(self, methods: Iterable[TracedMethod]) -> None:
        for owner, method, name in methods:
            setattr(owner, method, partial(self._timed, getattr(owner, method), name))

    def write(self, folder: Path) -> None:
        path = folder / f"{self._process}.json"
        path.write_text(json.dumps({"process": self._process, "spans": list(self._spans)}))

    def _timed(self, call: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        begin_ns = time.monotonic_ns()
        result = call(*args, **kwargs)
        step = next((found for each in (*args, result) if (found := _step(each))), None)
        self._spans.append(TraceSpan(name, step, begin_ns, time.monotonic_ns()))
        return result


@contextmanager
def traced(process: str, methods: Callable[[], Iterable[TracedMethod]]) -> Iterator[None]:
    """Trace this process for as long as the context lasts, if the run is to be traced."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        yield
        return
    tracer = Tracer(process)
    tracer.wrap(methods())
    try:
        yield
    finally:
        tracer.write(Path(folder))


def _step(value: object) -> int | None:
    """The step that an argument or result belongs to: of a plan, verdict or message."""
    for holder in (value, getattr(value, "verdict", None), _first_plan(value)):
        step = getattr(holder, "step", None)
        if isinstance(step, int):
            return step
    return None


def _first_plan(value: object) -> object:
    plans = getattr(value, "plans", None)
    return plans[-1] if plans else None
