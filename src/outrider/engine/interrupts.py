"""Ctrl-C that leaves the engine usable."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function to call between steps, which raises if Ctrl-C was pressed meanwhile.

    In the middle of a step it would leave a plan without its verdict, and the engine could not go
    on. Whoever does not want to wait presses it twice.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals arrive in the main thread only
        return
    pressed = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
