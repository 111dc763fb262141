"""The state file of the server on a head and its keeper: their processes and configuration."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD, LOG = "server.json", "server.log"


@dataclass(frozen=True, slots=True)
class Process:
    """A process by pid and start time: pids are reused."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that runs as `pid`; None if there is none."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else cls(pid, int(fields[19]))

    @property
    def is_running(self) -> bool:
        return Process.of(self.pid) == self


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """The last started server and keeper."""

    process: Process | None = None
    keeper: Process | None = None
    digest: str = ""  # of settings and code
    restarts: int = 0

    @classmethod
    def read(cls, folder: Path) -> HeadRecord:
        """An empty record if the file is missing or invalid."""
        try:
            found = json.loads((folder / RECORD).read_text())
            return cls(
                _process(found.get("process")),
                _process(found.get("keeper")),
                str(found.get("digest", "")),
                int(found.get("restarts", 0)),
            )
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Atomic: a concurrent reader sees the previous record."""
        made = folder / f"{RECORD}.{os.getpid()}"
        made.write_text(json.dumps(asdict(self)))
        made.replace(folder / RECORD)

    @property
    def running(self) -> Process | None:
        """The server, if it runs."""
        return _if_running(self.process)

    @property
    def running_keeper(self) -> Process | None:
        return _if_running(self.keeper)


def _process(found: dict[str, int] | None) -> Process | None:
    return None if found is None else Process(**found)


def _if_running(process: Process | None) -> Process | None:
    return process if process is not None and process.is_running else None
