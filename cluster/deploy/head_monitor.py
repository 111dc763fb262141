"""Ray's monitor process on the head, which starts Ray on other hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from outrider.cluster.errors import ClusterError

_PROGRAM = "ray/autoscaler/_private/monitor.py"
_FILE = "ray_bootstrap_config.yaml"  # passed by `ray up` only
_END_S = 10.0
_POLL_S = 0.05


def renew_monitor() -> bool:
    """Restart the monitor so that it reads the current list of hosts; whether there was one. Uses
    SIGKILL: all its state is in files, and SIGTERM would make it take all hosts down."""
    found = _find()
    for pid, command, environment in found:
        os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _END_S
        while Path(f"/proc/{pid}/exe").exists():
            if time.monotonic() > deadline_s:
                raise ClusterError(f"Ray's monitor (pid {pid}) does not end; end it and try again.")
            time.sleep(_POLL_S)
        subprocess.Popen(
            command,
            env=environment,
            cwd=Path.home(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return bool(found)


def _find() -> list[tuple[int, list[str], dict[str, str]]]:
    """Monitors of this user on this host: pid, command and environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or is another user's
            line = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if _PROGRAM in line and _FILE in line and _is_of_this_host(entry):
                words = line.rstrip("\0").split("\0")
                pairs = (entry / "environ").read_text().rstrip("\0").split("\0")
                environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                found.append((int(entry.name), words, environment))
    return found


def _is_of_this_host(process: Path) -> bool:
    """Whether the process is in our pid namespace, not in a container."""
    return os.readlink(process / "ns" / "pid") == os.readlink("/proc/self/ns/pid")
