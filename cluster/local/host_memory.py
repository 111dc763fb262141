"""Free memory of this host, and the memory of processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_KIB = 2**10
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Memory for further processes, within the limit of this cgroup; None if unknown."""
    found = [each for each in (_of_host(), _of_group()) if each is not None]
    return min(found, default=None)


def used_bytes(pids: Iterable[int]) -> int:
    """Their total proportional set size: shared pages are divided among the processes."""
    return sum(_number(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") or 0 for pid in pids)


def _of_host() -> int | None:
    return _number(Path("/proc/meminfo"), "MemAvailable:")


def _of_group() -> int | None:
    """Free memory of this cgroup (version 2), as in containers."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line for line in lines if line.startswith("0::"))
        folder = _CGROUPS / own.removeprefix("0::").lstrip("/")
        limit = int((folder / "memory.max").read_text())  # "max" means no limit
        used = int((folder / "memory.current").read_text())
        cache = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
        return max(limit - used + (int(cache[1]) if cache else 0), 0)
    return None


def _number(path: Path, name: str) -> int | None:
    """Bytes from a line in kB of a file in /proc."""
    with suppress(OSError):
        found = re.search(rf"^{name}\s+(\d+) kB$", path.read_text(), re.M)
        return int(found[1]) * _KIB if found else None
    return None
