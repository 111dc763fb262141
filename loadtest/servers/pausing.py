"""Pauses the processes of a server while another one is measured."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable


def pause(pids: Callable[[], Iterable[int]]) -> None:
    """Stops all processes that `pids` returns."""
    paused: set[int] = set()
    while new := set(pids()) - paused:  # a process may have forked meanwhile
        signal_all(new, signal.SIGSTOP)
        paused |= new


def resume(pids: Iterable[int]) -> None:
    signal_all(pids, signal.SIGCONT)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
