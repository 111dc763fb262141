"""What is left of this host's memory, and what processes have of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_KIB = 2**10
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """For further processes, within the limit of this one's control group; None if not known."""
    found = [each for each in (_of_host(), _of_group()) if each is not None]
    return min(found, default=None)


def used_bytes(pids: Iterable[int]) -> int:
    """What they have together; memory that several map is divided among them."""
    return sum(_number(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") or 0 for pid in pids)


def _of_host() -> int | None:
    return _number(Path("/proc/meminfo"), "MemAvailable:")


def _of_group() -> int | None:
    """Of cgroups version 2, as containers have it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line for line in lines if line.startswith("0::"))
        folder = _CGROUPS / own.removeprefix("0::").lstrip("/")
        limit = int((folder / "memory.max").read_text())  # "max" is none
        used = int((folder / "memory.current").read_text())
        cache = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
        return max(limit - used + (int(cache[1]) if cache else 0), 0)
    return None


def _number(path: Path, name: str) -> int | None:
    """Of a line of a file in /proc, which is in KiB."""
    with suppress(OSError):
        found = re.search(rf"^{name}\s+(\d+) kB$", path.read_text(), re.M)
        return int(found[1]) * _KIB if found else None
    return None
