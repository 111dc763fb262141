"""Runs the commands of a deployment: `ray` on this machine, and shells on the cluster's hosts."""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.deploy.cluster_file import ClusterFile
from outrider.cluster.errors import ClusterError
from outrider.errors import ConfigError
from outrider.requirements import install_command, requirements

# Prefixes of the lines of `outrider deploy on-head` among the output of shells and of Ray.
SAID, RESULT, FAILED = "outrider| ", "outrider= ", "outrider! "
_CONNECT_S = 10
_MARGIN_S = 60.0  # for connecting, beyond the command's own timeout
_NUM_LAST_LINES = 3
_QUEUE_LINES = 10_000
_POLL_S = 0.3

OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that has ended."""

    code: int
    lines: tuple[str, ...]

    @property
    def last_words(self) -> str:
        return " / ".join(line for line in self.lines if line.strip()) or "nothing"


def run(command: list[str], limit_s: float, on_line: OnLine, **options: Any) -> CommandResult:
    """Run a command to its end; `on_line` gets each line as it comes. Raises on timeout."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **options,
    )
    lines: queue.Queue[str | None] = queue.Queue(_QUEUE_LINES)
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    last: list[str] = []
    deadline_s = time.monotonic() + limit_s
    try:
        for line in _until_end(process, lines, deadline_s):
            on_line(line)
            last = [*last, line][-_NUM_LAST_LINES:]
        code = process.wait(max(0.0, deadline_s - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        last_words = CommandResult(1, tuple(last)).last_words
        raise ClusterError(
            f"`{shlex.join(command[:3])} ...` did not end within {limit_s:g} s; last output: "
            f"{last_words}"
        ) from None
    finally:
        process.kill()
        process.wait()
    return CommandResult(code, tuple(last))


def _until_end(
    process: subprocess.Popen[str], lines: queue.Queue[str | None], deadline_s: float
) -> Iterator[str]:
    """Lines until the process ends. Does not wait for the pipe to close: shared SSH connections
    keep it open for a while longer."""
    while True:
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            if process.poll() is not None:
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError from None
            continue
        if line is None:
            return
        yield line


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout as pipe:
        for line in pipe:
            lines.put(line.rstrip())
    lines.put(None)


class RayCommands:
    """The `ray` command, for one cluster file."""

    def __init__(self, file: ClusterFile, log: Path, scratch: Path) -> None:
        self._file = file
        self._log = log
        self._scratch = scratch

    def run(
        self, *words: str, limit_s: float, on_line: OnLine = lambda line: None
    ) -> CommandResult:
        """Run `ray WORDS` with the file's name after the first word; logs all output."""
        first, *others = words
        command = [_ray_program(), first, *others, str(self._file.path.resolve())]
        with self._log.open("a", encoding="utf-8", buffering=1) as log:
            log.write(f"$ {shlex.join(command)}\n")

            def log_line(line: str) -> None:
                log.write(f"{line}\n")
                on_line(line)

            environment = self.environment()
            return run(command, limit_s, log_line, env=environment, cwd=self._file.folder)

    def environment(self) -> dict[str, str]:
        # RAY_TMPDIR holds Ray's record of its hosts and must persist; the rest is temporary.
        found = dict(os.environ) | {"RAY_TMPDIR": ray_folder(), "TMPDIR": str(self._scratch)}
        found["RAY_USAGE_STATS_ENABLED"] = "0"
        if self._file.is_local:
            # Autoscaler v2 starts only one of several local hosts.
            found["RAY_UP_enable_autoscaler_v2"] = "0"
        return found

    def exec_command(self, command: str) -> list[str]:
        return [_ray_program(), "exec", str(self._file.path.resolve()), command]


def ray_folder() -> str:
    """Ray's temporary folder."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def _ray_program() -> str:
    beside = Path(sys.executable).with_name("ray")
    found = str(beside) if beside.exists() else shutil.which("ray")
    if found is None:
        command = install_command(requirements("deploy"))
        raise ConfigError(f"there is no command `ray`; install it with: {command}")
    return found


class Shells:
    """Login shells on the hosts: over `ray exec` for hosts that Ray created, directly over SSH,
    which is faster, for our own."""

    def __init__(self, file: ClusterFile, ray: RayCommands) -> None:
        self._file = file
        self._ray = ray

    def on_head(self, words: str, limit_s: float, say: OnLine) -> dict[str, Any]:
        """Run `outrider deploy on-head WORDS`; returns its result, raises its error."""
        result: dict[str, Any] | None = None
        failure: str | None = None

        def parse(line: str) -> None:
            nonlocal result, failure
            if line.startswith(SAID):
                say(line.removeprefix(SAID))
            elif line.startswith(RESULT):
                result = json.loads(line.removeprefix(RESULT))
            elif line.startswith(FAILED):
                failure = line.removeprefix(FAILED)

        command = f"outrider deploy on-head {words}"
        if self._file.is_local:
            arguments = self._ssh(self._file.head_ip, command)
        else:
            arguments = self._ray.exec_command(command)
        environment = self._ray.environment()
        done = run(arguments, limit_s + _MARGIN_S, parse, env=environment, cwd=self._file.folder)
        if failure is not None:
            raise ClusterError(failure)
        if result is None:
            raise ClusterError(
                f"the head of {self._file.name} gave no result; is Outrider installed there? "
                f"Last output: {done.last_words}"
            )
        return result

    def on(self, ip: str, command: str, limit_s: float) -> CommandResult:
        """Run a command on a host of our own."""
        return run(self._ssh(ip, command), limit_s, lambda line: None, cwd=self._file.folder)

    def _ssh(self, ip: str, command: str) -> list[str]:
        """With Ray's options: reinstalled hosts change their keys."""
        options = {
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": os.devnull,
            "LogLevel": "ERROR",
            "BatchMode": "yes",
            "ConnectTimeout": str(_CONNECT_S),
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
        }
        auth = self._file.auth
        if "ssh_proxy_command" in auth:
            options["ProxyCommand"] = auth["ssh_proxy_command"]
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        if "ssh_private_key" in auth:
            words += ["-i", str(Path(auth["ssh_private_key"]).expanduser())]
        # Interactive: many .bashrc files return early otherwise.
        shell = f"bash --login -i -c {shlex.quote(command)}"
        return ["ssh", *words, f"{auth['ssh_user']}@{ip}", shell]
