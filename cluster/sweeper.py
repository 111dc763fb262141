"""Sees to it that no process of a Ray started here outlives its server, however that one ends.

Ray's processes mostly end with the one that started them; some do not when that was killed. All
of them write their logs into one folder that no other process writes to, and so are known by what
they have open for writing; whoever only reads a log is somebody else. (A mark in the environment
would not do: some overwrite theirs with a title.)
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
    """A small process beside this one, which ends all that write to `folder` once this one is gone.

    Leaving the context ends them too.
    """

    def __init__(self, folder: Path) -> None:
        # In a session of its own: Ctrl-C must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.cluster.sweeper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end_all(self) -> None:
        """May be called again."""
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
    """Wait for the end of standard input, which is that of the server, then sweep."""
    spared = {os.getpid(), os.getppid()}
    sys.stdin.read()
    deadline_s = time.monotonic() + _SWEEP_S
    while kill_writers(Path(sys.argv[1]), spared) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)  # one of them may just have started another


def kill_writers(folder: Path, spared: Set[int]) -> int:
    """Kill every process that has a file of `folder` open for writing; how many there were.

    Hidden files do not count: editors keep those beside what they show.
    """
    count = 0
    for pid in _all_pids() - spared:
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
    """Files it has open for writing."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if _flags(pid, link.name) & (os.O_WRONLY | os.O_RDWR):
                yield link.readlink()


def _flags(pid: int, fd: str) -> int:
    """Those it was opened with."""
    lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


if __name__ == "__main__":
    main()
