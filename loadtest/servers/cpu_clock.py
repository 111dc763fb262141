"""Processor time of a process and of the machine, to recognise a disturbed run."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
USER_FIELD, SYSTEM_FIELD = 11, 12  # of /proc/PID/stat, counted after the command's name
OF_CHILDREN_FIELDS = (13, 14)  # the same of children that have ended and were waited for
IDLE_FIELDS = (3, 4)  # idle and waiting for a disk, in /proc/stat


def _tick_s() -> float:
    return 1.0 / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int, *, with_ended_children: bool = False) -> float | None:
    """Seconds of all the threads of a process, or None without `/proc` or such a process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    counted = (USER_FIELD, SYSTEM_FIELD, *(OF_CHILDREN_FIELDS if with_ended_children else ()))
    return sum(int(fields[i]) for i in counted) * _tick_s()


def machine_cpu_s() -> float | None:
    """Seconds all processors of the machine were busy since it started, or None without `/proc`."""
    try:
        with (PROC / "stat").open() as lines:
            counts = [int(field) for field in lines.readline().split()[1:9]]
    except OSError:
        return None
    return sum(count for i, count in enumerate(counts) if i not in IDLE_FIELDS) * _tick_s()
