"""Log files of worker processes: written so that they survive a crash, read from anywhere."""

from __future__ import annotations

import faulthandler
import os
from dataclasses import dataclass

from outrider.cluster.ray_facts import logs_folder

LAST_LINES = 15
_MAX_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True)
class OwnLog:
    """A log file from the place on where a process began to write."""

    path: str
    start: int


def redirect_output(name: str) -> OwnLog:
    """Send all this process prints, the last words of C code included, to a file of its own in
    Ray's log folder. Nothing is buffered, so nothing is lost by a kill."""
    path = logs_folder() / f"outrider-{name}.log"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    log = OwnLog(str(path), os.fstat(file).st_size)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(file=2)
    return log


def last_lines(log: OwnLog) -> list[str]:
    """The end of what a process wrote; runs on the process's own node."""
    try:
        with open(log.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(log.start, end - _MAX_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"{log.path} cannot be read: {error.strerror}"]
    return text.splitlines()[-LAST_LINES:]
