"""Signals that end a server: who hears them before its event loop does, and after."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


def others_that_end() -> tuple[signal.Signals, ...]:
    """Those besides Ctrl-C. The end of the terminal is one unless it is ignored, as by nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP


def noted_signals() -> list[int]:
    """Those that come from now on, until the loop hears them: raised within an import they could
    leave its lock held, for which the thread that starts Ray would wait for ever."""
    heard: list[int] = []
    for number in (signal.SIGINT, *others_that_end()):
        signal.signal(number, lambda number, _frame: heard.append(number))
    return heard


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Where there is no event loop to hear them, signals end the process as an error would: what
    was begun is undone. To be called again when a loop has let go of them."""
    numbers = others_that_end()

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # as shells report it

    def hear() -> None:
        for number in numbers:
            signal.signal(number, end)

    before = {number: signal.getsignal(number) for number in numbers}
    hear()
    try:
        yield hear
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_back_signals() -> None:
    """Ray's core, when it starts, takes SIGTERM for a failure, tells of it and ends the process by
    it, whatever Python had set before; and Python knows nothing of that."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
