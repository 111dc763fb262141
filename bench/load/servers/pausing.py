"""Stopping processes where they are while others are measured."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable


def pause(pids: Callable[[], Iterable[int]]) -> None:
    """Stop all that `pids` tells of."""
    paused: set[int] = set()
    while new := set(pids()) - paused:  # one of them may just have started another
        signal_all(new, signal.SIGSTOP)
        paused |= new


def resume(pids: Iterable[int]) -> None:
    signal_all(pids, signal.SIGCONT)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
