"""Keeps the server on a head running: starts it, and starts it anew whenever it has ended.

python -m outrider.cluster.head_keeper FOLDER

Ends on SIGTERM and leaves the server as it is: whoever ends both ends the keeper first. A keeper
that was killed has a successor that watches the server its predecessor has started.
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

from outrider.cluster.deploy_file import CONF_MOUNT
from outrider.cluster.head_record import LOG, Process, Record
from outrider.engine.launch.restarts import Restarts

ORDER = "keeper.json"
MOST_LOG_BYTES = 64 * 2**20  # and as much of what was before
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Order:
    """What a keeper is to keep running; in a file, as it may be started anew without being told."""

    digest: str  # of settings and code
    command: list[str]
    environment: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Order:
        return cls(**json.loads((folder / ORDER).read_text()))

    def write(self, folder: Path) -> None:
        """For its user only: the environment may hold tokens."""
        (folder / ORDER).unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(folder / ORDER, flags, 0o600), "w") as file:
            json.dump(asdict(self), file)


class Keeper:
    """Of the server of one folder."""

    def __init__(self, folder: Path, order: Order) -> None:
        self._folder = folder
        self._order = order
        self._log = folder / LOG
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Until SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopping.set())
        known = Record.read(self._folder)
        own = Process.of(os.getpid())
        record = replace(known, keeper=own, digest=self._order.digest)
        if known.running is None or known.digest != self._order.digest:
            record = replace(record, process=self._start(), restarts=0)
        record.write(self._folder)
        restarts = Restarts(is_first=False)
        while True:
            restarts.runs()
            self._watch(record.process)
            if self._stopping.is_set() or Record.read(self._folder).keeper != own:
                return  # ended, or another has its place
            pause_s = restarts.lost()
            self._say(f"the server has ended ({self._end()}); it is started anew in {pause_s:g} s")
            if self._stopping.wait(pause_s):
                return
            record = replace(record, process=self._start(), restarts=record.restarts + 1)
            record.write(self._folder)

    def _start(self) -> Process | None:
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._order.command,
                env=self._order.environment,
                cwd=self._folder / Path(CONF_MOUNT).name,  # files are named relative to it
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
        """The server goes on writing to the same file, so that is emptied rather than moved."""
        if self._log.stat().st_size > MOST_LOG_BYTES:
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
        sys.exit(f"error: another keeper is at work in {folder}.")
    Keeper(Path(folder), Order.read(Path(folder))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
