"""`outrider serve` as a process of its own, watched from outside."""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from waits import stretched, wait_until

from outrider.client import Client

START_S = 300.0
STOP_S = 40.0
_MARK = "_CLUSTER_TEST"
_POLL_S = 0.05
_OUTRIDER = [sys.executable, "-m", "outrider"]
_FREE_PORTS = {"OUTRIDER_SERVER_PORT": "0", "OUTRIDER_SERVER_GRPC_PORT": "0"}


class ServeProcess:
    """A server in a session of its own, as a terminal would start it.

    Its processes are found by a mark in their environment and by the files they have open,
    whoever their parent is by then. Leaving the context ends what is left.
    """

    def __init__(
        self,
        *arguments: str,
        command: str = "serve",
        is_nohup: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.lines: list[str] = []
        self._is_deaf = threading.Event()
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self._folder = tempfile.mkdtemp(prefix="t-")  # short: it is part of socket names
        # The tests themselves may run under nohup, which would be handed down.
        wrapper = ["nohup"] if is_nohup else ["env", "--default-signal=HUP"]
        self._process = subprocess.Popen(
            [*wrapper, *_OUTRIDER, command, *arguments],
            env=os.environ
            | _FREE_PORTS
            | {name: value, "OMP_NUM_THREADS": "1", "TMPDIR": self._folder}
            | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_ready(self) -> Client:
        wait_until(lambda: "Ctrl-C stops it" in self.output or not self.is_running, START_S)
        assert "Ctrl-C stops it" in self.output, f"it did not start:\n{self.output}"
        return Client(self.grpc_address)

    @property
    def grpc_address(self) -> str:
        """Of a server that is ready."""
        return self._found(r"for gRPC, on (\S+?)(;|\n)")

    @property
    def http_address(self) -> str:
        """Of a server that is ready."""
        return self._found(r"listening on http://(\S+)")

    @property
    def admin_address(self) -> str:
        """Of a server that is ready and has an admin port."""
        return self._found(r"for probes on http://(\S+)")

    def _found(self, pattern: str) -> str:
        found = re.search(pattern, self.output)
        assert found is not None, f"no {pattern!r} in:\n{self.output}"
        return found[1]

    def wait_line(self, pattern: str, timeout_s: float = 60.0) -> str:
        """The first line so far, or from now on, in which the pattern is found."""

        def found() -> list[str]:
            return [line for line in self.lines if re.search(pattern, line)]

        wait_until(lambda: bool(found()), timeout_s, lambda: f"no {pattern!r} in:\n{self.output}")
        return found()[0]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop_reading(self) -> None:
        """As if the terminal were gone: from now on what it prints is an error to it."""
        self._is_deaf.set()
        self._reader.join()

    def hang_up(self) -> None:
        """The end of a terminal: every process of the foreground is told."""
        os.killpg(self.pid, signal.SIGHUP)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def terminate_all(self) -> None:
        """As service managers do: every process of the service is told, but for those that have
        left its group."""
        os.killpg(self.pid, signal.SIGTERM)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals every process of the foreground."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Its exit code."""
        code = self._process.wait(stretched(timeout_s))
        self._reader.join(stretched(timeout_s))
        return code

    def left_pids(self) -> list[int]:
        """Processes that belong to it and still run, itself included."""
        return [pid for pid in all_pids() if self._is_own(pid)]

    def pids_of(self, pattern: str) -> list[int]:
        """Those of them in whose command line the pattern is found."""
        return [pid for pid in self.left_pids() if re.search(pattern, command_line(pid))]

    def _is_own(self, pid: int) -> bool:
        if is_marked(pid, self._mark):
            return True
        try:
            links = list(Path(f"/proc/{pid}/fd").iterdir())
            return any(str(link.readlink()).startswith(self._folder) for link in links)
        except OSError:  # it has ended, or is another user's
            return False

    def left_files(self) -> list[str]:
        """What is in the folder for passing files."""
        return sorted(os.listdir(self._folder))

    def wait_nothing_left(self, timeout_s: float = 60.0) -> None:
        wait_until(lambda: not self.left_pids(), timeout_s, lambda: f"left: {self._left()}")

    def _left(self) -> list[str]:
        return [command_line(pid) for pid in self.left_pids()]

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            rest = b""
            while not self._is_deaf.is_set():
                if not select.select([pipe], [], [], _POLL_S)[0]:
                    continue
                found = os.read(pipe.fileno(), 2**16)
                if not found:
                    return
                *lines, rest = (rest + found).split(b"\n")
                self.lines += [line.decode(errors="replace") + "\n" for line in lines]

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pid in self.left_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


KILL_AFTER = 30  # tokens


def streamed_tokens(
    client: Client, prompt: str, kill: int | None = None, **params: Any
) -> list[int]:
    """The tokens of one request, in the middle of which a process is killed."""
    tokens: list[int] = []
    with client.stream(prompt, timeout_s=stretched(60), **params) as stream:
        for chunk in stream:
            tokens += chunk.token_ids
            if kill is not None and len(tokens) >= KILL_AFTER:
                os.kill(kill, signal.SIGKILL)
                kill = None
    assert kill is None
    return tokens


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def is_marked(pid: int, mark: str) -> bool:
    """Whether "NAME=value" is in its environment, which processes hand down."""
    return mark in _text(f"/proc/{pid}/environ").split("\0")


def command_line(pid: int) -> str:
    return _text(f"/proc/{pid}/cmdline").replace("\0", " ")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""
