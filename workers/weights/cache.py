"""The user's cache folder, and folders that appear in it whole or not at all."""

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
from outrider.stages import stage

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 2 * 3600.0  # large models come slowly; whoever starts a process has limits of its own
LOCK_POLL_S = 0.1
LOCK_TOLD_S = 30.0
ABANDONED_S = 6 * 3600.0


def cache_folder() -> Path:
    """`OUTRIDER_CACHE`, or `~/.cache/outrider`."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "outrider"


def boot_id() -> str:
    """Of this start of the system on this host."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def open_own(path: Path) -> int:
    """A handle to read a file of this user's. `OSError` if there is none, `ValueError` if it is
    something else: a pipe is not waited for, a link not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return handle
    os.close(handle)
    raise ValueError(f"{path} is no file of this user's (mode {found.st_mode:o}, {found.st_uid})")


def read_own(path: Path) -> str:
    """As `open_own`."""
    with os.fdopen(open_own(path), encoding="utf-8") as file:
        return file.read()


def write_own(path: Path, text: str) -> None:
    """The whole file or nothing; what somebody has put in the way is not written to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.unlink(missing_ok=True)
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except OSError:  # a full disk does not keep the beginning of it
        scratch.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path, what: str, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Only one process of this host at a time is inside; the others say what they wait for.

    The system lets go of the lock of a process that has ended, however it ended. Where the folder
    cannot be written to, there is no lock: whoever prepared it has put there what is needed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # For nobody else: whoever may open it, if only to read, may hold it for ever.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        logger.debug("no lock for %s: %s", what, error)
        yield
        return
    try:
        with stage(f"waiting for {what} by another process"):
            _await_lock(handle, path, what, wait_s)
        with suppress(OSError):  # only who holds it, for those that wait; the disk may be full
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(handle)


def _await_lock(handle: int, path: Path, what: str, wait_s: float) -> None:
    start_s = told_s = time.monotonic()
    is_told = False
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
                f"{what} by another process (pid {holder}) was not over after {wait_s:g} s; end "
                f"that process if it hangs (the lock is {path})."
            )
        if not is_told or now_s - told_s > LOCK_TOLD_S:
            is_told, told_s = True, now_s
            logger.info("waiting for %s by another process (pid %s)", what, holder)
        time.sleep(LOCK_POLL_S)


def build_folder(final: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder, then put it in the place of `final` in one step.

    Of several processes that build the same folder at once, one wins and the others' is dropped.
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
    """Remove what killed builders of the same folder left behind."""
    for leftover in final.parent.glob(f".{final.name}.*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(leftover)


def discard_folder(folder: Path) -> None:
    """Remove a folder so that nobody ever sees half of it."""
    doomed = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.replace(folder, doomed / "old")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(doomed, ignore_errors=True)
