"""A systemd unit that runs the keeper of a head's server, if the cluster's file asks for one. It
survives hosts that kill a session's processes at logout."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from outrider.cluster.errors import ClusterError

UNIT = "outrider.service"
_LIMIT_S = 30.0
_TEXT = """\
# Written by `outrider deploy up`, removed by `outrider deploy down`.
[Unit]
Description=Keeper of the Outrider server in {folder}

[Service]
ExecStart={command}
# The server drains on its own; `outrider deploy` ends it.
KillMode=process
Restart=always
RestartSec=2

[Install]
WantedBy={target}
"""


class Systemd:
    """The system's systemd for root, else the user's with lingering enabled."""

    def __init__(self, *, is_root: bool | None = None, home: Path | None = None) -> None:
        self._is_root = os.geteuid() == 0 if is_root is None else is_root
        user = (home or Path.home()) / ".config/systemd/user"
        self.unit = (Path("/etc/systemd/system") if self._is_root else user) / UNIT

    def install(self, folder: Path, command: Sequence[str]) -> None:
        """Install and start the unit. Raises if systemd is missing or refuses."""
        target = "multi-user.target" if self._is_root else "default.target"
        text = _TEXT.format(folder=folder, command=" ".join(map(_quoted, command)), target=target)
        try:
            self.unit.parent.mkdir(parents=True, exist_ok=True)
            self.unit.write_text(text)
        except OSError as error:
            raise ClusterError(f"{self.unit} cannot be written: {error.strerror}.") from error
        try:
            if not self._is_root:
                self._run("loginctl", "enable-linger")
            self._run(*self._systemctl, "daemon-reload")
            self._run(*self._systemctl, "enable", UNIT)
            self._run(*self._systemctl, "restart", UNIT)
        except ClusterError:
            self.unit.unlink()
            raise

    def remove(self) -> None:
        """End the keeper and remove the unit. Does nothing if there is none."""
        if self.unit.exists():
            self._run(*self._systemctl, "disable", "--now", UNIT)
            self.unit.unlink()
            self._run(*self._systemctl, "daemon-reload")

    @property
    def _systemctl(self) -> tuple[str, ...]:
        return ("systemctl",) if self._is_root else ("systemctl", "--user")

    def _run(self, *command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"`{' '.join(command)}` failed: {error}; {_REMEDY}") from error
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().rpartition("\n")[2]
            raise ClusterError(f"`{' '.join(command)}` failed: {reason}; {_REMEDY}")


_REMEDY = "remove metadata.supervisor from the cluster's file to run without a unit."


def _quoted(word: str) -> str:
    """Quote a word for a unit file."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
