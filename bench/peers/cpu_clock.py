"""Processor time of a process and of the machine: tells a disturbed run from a slow one."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
USER_FIELD, SYSTEM_FIELD = 11, 12  # of /proc/PID/stat, counted after the command's name
IDLE_FIELDS = (3, 4)  # idle and waiting for a disk, in /proc/stat


def _tick_s() -> float:
    return 1.0 / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float | None:
    """Seconds of all the threads of a process, or None without `/proc` or such a process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return (int(fields[USER_FIELD]) + int(fields[SYSTEM_FIELD])) * _tick_s()


def machine_cpu_s() -> float | None:
    """Seconds all processors of the machine were busy since it started, or None without `/proc`."""
    try:
        with (PROC / "stat").open() as lines:
            counts = [int(field) for field in lines.readline().split()[1:9]]
    except OSError:
        return None
    return sum(count for i, count in enumerate(counts) if i not in IDLE_FIELDS) * _tick_s()
