"""The folder of an engine's Unix socket: inside Ray's session folder, removed with it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "e-"  # short: socket paths are limited to 108 bytes


def make_engine_folder(parent: Path) -> Path:
    """Make the folder of this process. Also removes those of killed engines, which would stay as
    long as Ray runs."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if not _has_owner(folder):
            shutil.rmtree(folder, ignore_errors=True)
    own = parent / f"{_PREFIX}{os.getpid()}"
    with suppress(FileExistsError):  # of a process with the same pid in another container
        own.mkdir(mode=0o700)
        return own
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def _has_owner(folder: Path) -> bool:
    """Whether an engine listens there, or is about to."""
    with suppress(OSError):  # removed by another engine
        for path in folder.iterdir():
            return _is_answered(path)
    return Path("/proc", folder.name.removeprefix(_PREFIX)).exists()


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a hung or foreign listener must not block the start
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # the backlog is full, so a process listens
            return True
    return True
