"""What processes hold that may outlive them, ports and shared memory; and whose connection is
whose."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LISTENING, _ESTABLISHED = "0A", "01"
_SHARED_MEMORY = Path("/dev/shm")


class _Socket(NamedTuple):
    port: int
    state: str
    inode: int


class Footprint:
    """Collects what a server's processes hold while they live; `left` is what is still there."""

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}  # by inode of the listening socket
        self._memory: set[Path] = set()

    def note(self, pids: Iterable[int]) -> None:
        for pid in pids:
            own = _inodes(pid)
            for each in _sockets(pid):
                if each.state == _LISTENING and each.inode in own:
                    self._ports[each.inode] = each.port
            self._memory |= _shared_memory(pid)

    def left(self) -> list[str]:
        listening = {each.inode for each in _sockets("self") if each.state == _LISTENING}
        ports = [f"port {port}" for inode, port in self._ports.items() if inode in listening]
        return ports + [str(path) for path in self._memory if path.exists()]


def holders_of(port: int, pids: Iterable[int]) -> list[int]:
    """Those of the processes that have a connection of somebody who dialled this port."""
    return [
        pid
        for pid in pids
        if _inodes(pid)
        & {e.inode for e in _sockets(pid) if (e.port, e.state) == (port, _ESTABLISHED)}
    ]


def _inodes(pid: int) -> set[int]:
    """Of its sockets."""
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it has ended, or opens and closes files meanwhile
        return set()
    found = (re.fullmatch(r"socket:\[(\d+)\]", link) for link in links)
    return {int(match[1]) for match in found if match}


def _sockets(pid: int | str) -> list[_Socket]:
    """TCP's, of the network that this process sees."""
    found = []
    for kind in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            found.append(_Socket(port, fields[3], int(fields[9])))
    return found


def _shared_memory(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    paths = {
        line.split(maxsplit=5)[5] for line in maps.splitlines() if f"{_SHARED_MEMORY}/" in line
    }
    return {Path(path) for path in paths if not path.endswith("(deleted)")}
