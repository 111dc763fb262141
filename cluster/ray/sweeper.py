"""Kills the processes of a Ray started here when its server ends, in whatever way.

Ray's processes usually end with the one that started them, but some survive its SIGKILL. All write
their logs into one folder, so a process with a file open for writing there is Ray's; a reader is
not. (A mark in the environment would fail: some processes overwrite theirs with a title.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Set
from pathlib import Path
from types import TracebackType

_SWEEP_S = 10.0
_POLL_S = 0.05


class Sweeper:
    """A helper process that kills all writers of `folder` once this process is gone, or on exit of
    the context.
    """

    def __init__(self, folder: Path) -> None:
        # In a session of its own: Ctrl-C must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.cluster.ray.sweeper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end_all(self) -> None:
        """Kill all writers now. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Sweeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end_all()


def main() -> None:
    """Wait for EOF on standard input, the end of the server, then sweep."""
    excluded = {os.getpid(), os.getppid()}
    sys.stdin.read()
    deadline_s = time.monotonic() + _SWEEP_S
    while kill_writers(Path(sys.argv[1]), excluded) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)  # a killed process may just have started another


def kill_writers(folder: Path, excluded: Set[int]) -> int:
    """Kill every process with a file of `folder` open for writing; returns their number.

    Ignores hidden files: editors keep swap files beside a log.
    """
    count = 0
    for pid in _all_pids() - excluded:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            handle = os.pidfd_open(pid)
            try:
                written = (path for path in _written_files(pid) if path.is_relative_to(folder))
                if any(not path.name.startswith(".") for path in written):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    count += 1
            finally:
                os.close(handle)
    return count


def _all_pids() -> set[int]:
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


def _written_files(pid: int) -> Iterator[Path]:
    """Files that the process has open for writing."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if _flags(pid, link.name) & (os.O_WRONLY | os.O_RDWR):
                yield link.readlink()


def _flags(pid: int, fd: str) -> int:
    """The flags of an open file."""
    lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


if __name__ == "__main__":
    main()
