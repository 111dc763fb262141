"""The user's cache folder, with atomic writes and locks."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import ModelError
from outrider.progress_stages import stage

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 2 * 3600.0  # downloads may be slow; launchers have timeouts of their own
LOCK_POLL_S = 0.1
LOCK_LOG_INTERVAL_S = 30.0
ABANDONED_S = 6 * 3600.0
UNUSED_S = 7 * 24 * 3600.0


def cache_folder() -> Path:
    """`OUTRIDER_CACHE`, or `~/.cache/outrider`."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "outrider"


def boot_id() -> str:
    """Identifies this boot of the host."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def open_own(path: Path) -> int:
    """Open a file of this user for reading. `OSError` if there is none, `ValueError` if it is not a
    regular file of this user: does not block on pipes or follow links."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return handle
    os.close(handle)
    raise ValueError(f"{path} is no file of this user's (mode {status.st_mode:o}, {status.st_uid})")


def read_own(path: Path) -> str:
    """Read a text file, with the checks of `open_own`."""
    with os.fdopen(open_own(path), encoding="utf-8") as file:
        return file.read()


def write_own(path: Path, text: str) -> None:
    """Write a file atomically; never writes to an existing file or link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.unlink(missing_ok=True)
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except OSError:  # a full disk: remove the partial file
        scratch.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path, what: str, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold an exclusive lock between processes of this host; waiting processes log `what` they wait
    for.

    The kernel releases the lock when a process ends. A read-only folder has no lock: its files were
    prepared beforehand.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Private: any process that can open it, even read-only, could hold the lock forever.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        logger.debug("no lock for %s: %s", what, error)
        yield
        return
    try:
        with stage(f"waiting for {what} by another process"):
            _await_lock(handle, path, what, wait_s)
        with suppress(OSError):  # only informs waiting processes; the disk may be full
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(handle)


def _await_lock(handle: int, path: Path, what: str, wait_s: float) -> None:
    start_s = logged_s = time.monotonic()
    is_logged = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        now_s = time.monotonic()
        holder = os.pread(handle, 200, 0).decode(errors="replace") or "unknown"
        if now_s - start_s > wait_s:
            raise ModelError(
                f"{what} by another process (pid {holder}) did not finish within {wait_s:g} s; end "
                f"that process if it hangs (the lock is {path})."
            )
        if not is_logged or now_s - logged_s > LOCK_LOG_INTERVAL_S:
            is_logged, logged_s = True, now_s
            logger.info("waiting for %s by another process (pid %s)", what, holder)
        time.sleep(LOCK_POLL_S)


def build_folder(final: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder, then rename it to `final` atomically.

    If several processes build the same folder at once, one wins and the others' are dropped.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        build(scratch)
        try:
            os.replace(scratch, final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(final: Path) -> None:
    """Remove temporary folders of killed builders of the same folder."""
    for leftover in final.parent.glob(f".{final.name}.*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(leftover)


def discard_folder(folder: Path) -> None:
    """Remove a folder atomically: other processes never see half of it."""
    doomed = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.replace(folder, doomed / "old")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete files unused for a week: of earlier boots, removed checkpoints or killed writers."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
