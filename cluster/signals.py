"""Handlers for the signals that end a server, before and after its event loop runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


def termination_signals() -> tuple[signal.Signals, ...]:
    """Terminating signals besides SIGINT. SIGHUP only unless it is ignored, as by nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP


def record_signals() -> list[int]:
    """Record signals until the loop handles them. An exception raised within an import could leave
    the import lock held, and the thread that starts Ray would deadlock."""
    received: list[int] = []
    for number in (signal.SIGINT, *termination_signals()):
        signal.signal(number, lambda number, _frame: received.append(number))
    return received


@contextlib.contextmanager
def exit_on_signals() -> Iterator[Callable[[], None]]:
    """Without an event loop, signals raise SystemExit, so that contexts clean up. Call the yielded
    function after a loop has removed its handlers."""
    numbers = termination_signals()

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # as shells report it

    def install() -> None:
        for number in numbers:
            signal.signal(number, end)

    before = {number: signal.getsignal(number) for number in numbers}
    install()
    try:
        yield install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def restore_signals() -> None:
    """Reinstall Python's handlers: Ray's core replaces the SIGTERM handler by one that kills the
    process, without Python's knowledge."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
