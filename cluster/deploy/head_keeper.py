"""Supervises the server on a head: starts it, and restarts it whenever it ends.

python -m outrider.cluster.deploy.head_keeper FOLDER

Ends on SIGTERM and leaves the server running: to end both, end the keeper first. The successor of a
killed keeper adopts the running server.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.cluster.deploy.cluster_file import CONF_MOUNT
from outrider.cluster.deploy.head_record import LOG, HeadRecord, Process
from outrider.restarts import Restarts

SPEC_FILE = "keeper.json"
MAX_LOG_BYTES = 64 * 2**20  # and as much of the previous log
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class KeeperSpec:
    """The command a keeper runs; in a file, so that a restarted keeper finds it."""

    digest: str  # of settings and code
    command: list[str]
    environment: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> KeeperSpec:
        return cls(**json.loads((folder / SPEC_FILE).read_text()))

    def write(self, folder: Path) -> None:
        """Readable by its user only: the environment may hold tokens."""
        (folder / SPEC_FILE).unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(folder / SPEC_FILE, flags, 0o600), "w") as file:
            json.dump(asdict(self), file)


class Keeper:
    """Supervises the server of one folder."""

    def __init__(self, folder: Path, spec: KeeperSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._log = folder / LOG
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run until SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopping.set())
        known = HeadRecord.read(self._folder)
        own = Process.of(os.getpid())
        record = replace(known, keeper=own, digest=self._spec.digest)
        if known.running is None or known.digest != self._spec.digest:
            record = replace(record, process=self._start(), restarts=0)
        record.write(self._folder)
        restarts = Restarts(is_first=False)
        while True:
            restarts.runs()
            self._watch(record.process)
            if self._stopping.is_set() or HeadRecord.read(self._folder).keeper != own:
                return  # stopped, or replaced by another keeper
            pause_s = restarts.lost()
            self._say(f"the server has ended ({self._end()}); restarting in {pause_s:g} s")
            if self._stopping.wait(pause_s):
                return
            record = replace(record, process=self._start(), restarts=record.restarts + 1)
            record.write(self._folder)

    def _start(self) -> Process | None:
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._spec.command,
                env=self._spec.environment,
                cwd=self._folder / Path(CONF_MOUNT).name,  # relative paths of the configuration
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Process.of(self._child.pid)

    def _watch(self, process: Process | None) -> None:
        while process is not None and process.is_running and not self._stopping.wait(_POLL_S):
            self._bound_log()

    def _end(self) -> str:
        if self._child is None:
            return "it was started by an earlier keeper"
        code = self._child.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _bound_log(self) -> None:
        """Copy and truncate: the server keeps the file open."""
        if self._log.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(self._log, self._log.with_suffix(".log.1"))
            os.truncate(self._log, 0)

    def _say(self, text: str) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")


def main(folder: str) -> None:
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"error: another keeper already runs in {folder}.")
    Keeper(Path(folder), KeeperSpec.read(Path(folder))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
