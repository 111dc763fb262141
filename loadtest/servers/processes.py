"""Resource usage of local processes, from `/proc`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from outrider.loadtest.servers.cpu_clock import process_cpu_s
from outrider.loadtest.servers.keeper import descendants

_KB_PER_MB = 1024
_LISTENING = "0A"
_STATUS = re.compile(r"^(VmRSS|RssAnon|RssShmem|VmSwap|Threads):\s+(\d+)", re.MULTILINE)


@dataclass(slots=True)
class ResourceUsage:
    """Resource usage summed over processes.

    `memory_mb` is resident memory; shared pages count in each process. `anonymous_mb` is memory
    not backed by files, swapped out or not: it excludes mapped weights and includes leaks. Both
    take microseconds to read; proportional shares would walk the server's page tables.
    """

    processes: int = 0
    memory_mb: float = 0.0
    anonymous_mb: float = 0.0
    handles: int = 0
    threads: int = 0
    cpu_s: float = 0.0


def use_of_tree(root: int, *, counts_root: bool = True) -> ResourceUsage | None:
    """Usage of a process and its descendants; None if it is gone.

    CPU time includes children that have exited.
    """
    total = process_cpu_s(root, with_ended_children=True)
    if total is None:
        return None
    below = descendants(root)
    use = use_of([root, *below] if counts_root else below)
    use.cpu_s = total + sum(process_cpu_s(pid, with_ended_children=True) or 0.0 for pid in below)
    return use


def use_of(pids: Iterable[int]) -> ResourceUsage:
    """Processes that have exited are skipped."""
    use = ResourceUsage()
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
            handles = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # it has exited, or belongs to another user
            continue
        found = {name: int(number) for name, number in _STATUS.findall(status)}
        anonymous = sum(found.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))
        use.processes += 1
        use.memory_mb += found.get("VmRSS", 0) / _KB_PER_MB
        use.anonymous_mb += anonymous / _KB_PER_MB
        use.handles += handles
        use.threads += found.get("Threads", 0)
        use.cpu_s += process_cpu_s(pid) or 0.0
    return use


def listening_pid(url: str) -> int | None:
    """The process listening at a loopback address; None for other addresses.

    If several share the socket, the parent of the others.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host and port else []
    except (ValueError, OSError):
        return None
    if not any(str(name[0]).startswith("127.") or name[0] == "::1" for *_, name in found):
        return None
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listeners(table, port or 0)}
    pids = [pid for pid in _all_pids() if inodes and _has_socket(pid, inodes)]
    return next((pid for pid in pids if parent_of(pid) not in pids), None)


def _listeners(table: str, port: int) -> set[str]:
    try:
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return set()
    rows = [line.split() for line in lines]
    ending = f":{port:04X}"
    return {row[9] for row in rows if row[3] == _LISTENING and row[1].endswith(ending)}


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def _has_socket(pid: int, inodes: set[str]) -> bool:
    links = {f"socket:[{inode}]" for inode in inodes}
    try:
        folder = f"/proc/{pid}/fd"
        return any(os.readlink(f"{folder}/{fd}") in links for fd in os.listdir(folder))
    except OSError:  # it has exited, has closed a handle, or belongs to another user
        return False


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
