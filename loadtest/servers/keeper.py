"""`python -I keeper.py PARENT GRACE_S COMMAND...`: runs a command and leaves no process behind.

Runs between the harness and a server. As a child subreaper it knows all descendants of the
command, daemons included, and ends them when the command exits, on SIGTERM, or when the harness
is gone for any reason. Run as a file: it must not depend on the command's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.25
KILL_S = 5.0  # for killed processes to be gone
NOT_FOUND = 127  # the shells' exit code
_WAKING = {signal.SIGTERM, signal.SIGCHLD}
_PARENT_FIELD = 1  # of /proc/PID/stat, counted after the command's name


def main() -> None:
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = _spawn(command)
    code = _watch(pid, parent)
    ended = _end_all(pid, grace_s, is_running=code is None)
    sys.exit(code if code is not None else ended)


def descendants(pid: int) -> list[int]:
    """All descendants of a process, parents before children."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Every process with its parent, except zombies."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just exited
                text = Path(f"/proc/{entry.name}/stat").read_text(errors="replace")
                state, parent = text.rpartition(")")[2].split()[: _PARENT_FIELD + 1]
                if state != "Z":
                    yield int(entry.name), int(parent)


def _spawn(command: list[str]) -> int:
    own = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
        if os.getppid() == own:  # else the parent exited before prctl took effect
            os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    finally:
        os._exit(NOT_FOUND)


def _watch(pid: int, parent: int) -> int | None:
    """Waits until the command exits and returns its code; None if it is to be ended."""
    while os.getppid() == parent:
        received = signal.sigtimedwait(_WAKING, POLL_S)
        codes = _reap()
        if pid in codes:
            return codes[pid]
        if received is not None and received.si_signo == signal.SIGTERM:
            break
    return None


def _end_all(pid: int, grace_s: float, *, is_running: bool) -> int:
    """Ends the command first, so that it stops its children in order, then the remaining ones."""
    deadline_s = time.monotonic() + grace_s
    code = 0
    if is_running:
        _send([pid], signal.SIGTERM)
        _send(descendants(os.getpid()), signal.SIGCONT)  # the harness may have paused them
        codes = _wait_until_gone([pid], deadline_s)
        code = codes.get(pid, 128 + signal.SIGKILL)
    left = descendants(os.getpid())
    _send(left, signal.SIGTERM)
    _send(left, signal.SIGCONT)
    _wait_until_gone(left, deadline_s)
    deadline_s = time.monotonic() + KILL_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline_s:
        _send(left, signal.SIGKILL)  # repeated: a process may have forked meanwhile
        _wait_until_gone(left, min(deadline_s, time.monotonic() + POLL_S))
    return code


def _wait_until_gone(pids: list[int], deadline_s: float) -> dict[int, int]:
    """Returns the exit codes of processes reaped meanwhile."""
    codes: dict[int, int] = {}
    while True:
        codes |= _reap()
        left = set(pids) & set(descendants(os.getpid()))
        left_s = deadline_s - time.monotonic()
        if not left or left_s <= 0:
            return codes
        signal.sigtimedwait({signal.SIGCHLD}, min(POLL_S, left_s))


def _reap() -> dict[int, int]:
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            codes[ended[0]] = code if code >= 0 else 128 - code
    return codes


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
