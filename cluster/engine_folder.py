"""Where an engine in Ray has its socket: in Ray's own folder, which goes with Ray."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "e-"  # short, as the names of sockets must be


def make_engine_folder(parent: Path) -> Path:
    """For this process. Those of engines that were killed are removed: nobody else does it for as
    long as Ray runs."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if not _has_owner(folder):
            shutil.rmtree(folder, ignore_errors=True)
    own = parent / f"{_PREFIX}{os.getpid()}"
    with suppress(FileExistsError):  # of a process that has the same number in another container
        own.mkdir(mode=0o700)
        return own
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def _has_owner(folder: Path) -> bool:
    """Whether somebody listens there, or is about to."""
    with suppress(OSError):  # somebody else removes it
        for path in folder.iterdir():
            return _is_answered(path)
    return Path("/proc", folder.name.removeprefix(_PREFIX)).exists()


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # somebody who hangs, or is not one of ours, holds nobody up
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # its queue is full, so somebody does listen
            return True
    return True
