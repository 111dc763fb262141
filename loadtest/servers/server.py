"""Servers under test: start, readiness, pausing between turns, and stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from outrider.errors import ConfigError, OutriderError
from outrider.loadtest.plain import plain
from outrider.loadtest.servers import keeper, pausing
from outrider.loadtest.servers.processes import listening_pid
from outrider.loadtest.targets.registry import split_address

START_S = 600.0  # for a command, and for a server that has answered before
REACH_S = 5.0  # for a server that should be running already
GRACE_S = 20.0  # from SIGTERM to SIGKILL
LOG_LINES_SHOWN = 15
_LOG_BYTES_SHOWN = 16 * 1024
_UNFIT_FOR_FILES = re.compile(r"[^\w.-]")
_MAX_NAME_CHARS = 60
_PORT = "{port}"
# Below the ephemeral ports: a client's connection must not take the port of a server that is
# stopped between its turns.
_PORTS = range(20_000, 32_000)
_TRIES = 200
_POLL_S = 0.2
_PROBE_TIMEOUT_S = 2.0
_HTTP_OK = 200
_NO_SUCH_PAGE = (401, 403, 404, 405, 501)  # says nothing about readiness


class ServerError(OutriderError):
    """A server did not start, exited early or does not answer."""


class Idle(StrEnum):
    """What happens to a server while another is measured."""

    LEAVE = "leave"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class IdleRule:
    idle: Idle
    reason: str


def idle_rule(command: str | None, *, is_alone: bool) -> IdleRule:
    """The default policy for a server between its turns, and the reason."""
    if command is None:
        return IdleRule(Idle.LEAVE, "the harness did not start it, so it is left running")
    if is_alone:
        return IdleRule(Idle.LEAVE, "all arms share it, so it is always measured")
    if "outrider" in command and "serve" in shlex.split(command):
        reason = "Outrider treats a paused process as dead, so it is stopped between turns"
        return IdleRule(Idle.STOP, reason)
    return IdleRule(Idle.PAUSE, "its processes are paused between turns")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """`{port}` in address and command is replaced with a free port at start."""

    name: str
    url: str  # as a target's
    command: str | None = None  # split like a shell, run without one; None: already running
    env: Mapping[str, str] = field(default_factory=dict)  # added to the harness's own
    cwd: Path | None = None
    ready_timeout_s: float | None = None  # None: START_S if the harness starts it, else REACH_S
    idle: Idle = Idle.LEAVE
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    insecure: bool = False  # do not check the certificate

    def __post_init__(self) -> None:
        split_address(
            self.url.replace(_PORT, "1")
        )  # fail early instead of waiting for a wrong address
        if self.command is None:
            wrong = f"the address {self.url!r} has {_PORT}, but there is no command to start"
            if _PORT in self.url:
                raise ConfigError(f"server {self.name}: {wrong}; give the port, or a command.")
            if self.idle is not Idle.LEAVE:
                raise ConfigError(
                    f"server {self.name}: idle is {str(self.idle)!r}, but the harness has not "
                    "started it; use 'leave', or give its command."
                )
            return
        try:
            parts = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(
                f"server {self.name}: the command {self.command!r} cannot be split ({error}); "
                "close its quotes."
            ) from None
        if not parts:
            raise ConfigError(f"server {self.name}: the command is empty; give one.")

    @property
    def api_key(self) -> str | None:
        """The API key in the headers, for clients that take it separately."""
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        return key if kind == "Bearer" and key else None


class ServerUnderTest:
    """One server of a run. Use from one event loop; `stop` may be called at any time.

    No process of a started command outlives `stop` or the harness.
    """

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        self.spec = spec
        name = _UNFIT_FOR_FILES.sub("_", spec.name)[:_MAX_NAME_CHARS]
        self.log_path = folder / f"server-{name}.log"
        self.is_resting = False
        port = _free_port() if _PORT in f"{spec.url}{spec.command}" else 0
        # Kept across restarts: clients know the address.
        self.url = spec.url.replace(_PORT, str(port))
        self.command = spec.command and spec.command.replace(_PORT, str(port))
        self._keeper: subprocess.Popen[bytes] | None = None
        self._found: int | None = None
        self._has_answered = False
        self._log_mode: Literal["wb", "ab"] = "wb"  # overwrite the log of an earlier run

    @property
    def is_running(self) -> bool:
        """Whether the harness started the command and it is still running."""
        return self._keeper is not None and self._keeper.poll() is None

    @property
    def root_pid(self) -> int | None:
        """Root of a local server's process tree; None if unknown.

        For a started server this is the keeper, which is not part of the server.
        """
        if self.spec.command is not None:
            return self._keeper.pid if self._keeper is not None and self.is_running else None
        if self._found is None or not Path(f"/proc/{self._found}").exists():
            self._found = listening_pid(self.url)
        return self._found

    def pids(self) -> list[int]:
        """The processes of a local server, parents before children; empty if unknown."""
        root = self.root_pid
        if root is None:
            return []
        return ([] if self.is_running else [root]) + keeper.descendants(root)

    async def start(self) -> None:
        """Starts the command, if there is one, and waits until the server answers."""
        if self.command is not None and not self.is_running:
            self._spawn(self.command)
        self.is_resting = False
        try:
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise

    async def wait_ready(self) -> None:
        timeout_s = self._ready_timeout_s()
        deadline_s = time.monotonic() + timeout_s
        while not await is_ready(self.url, self.spec.headers, insecure=self.spec.insecure):
            if self._keeper is not None and (code := self._keeper.poll()) is not None:
                raise ServerError(
                    f"server {self.spec.name} exited with code {code} before it answered at "
                    f"{self.url}; {self._log_end()}"
                )
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"server {self.spec.name} does not answer at {self.url} within "
                    f"{timeout_s:g} s; {self._log_end()}"
                )
            await asyncio.sleep(_POLL_S)
        self._has_answered = True

    def _ready_timeout_s(self) -> float:
        """Short for a server not started here: if it does not answer, its address is wrong."""
        if self.spec.ready_timeout_s is not None:
            return self.spec.ready_timeout_s
        return START_S if self.command is not None or self._has_answered else REACH_S

    async def rest(self) -> None:
        """Applies `spec.idle` while others are measured."""
        if self.spec.idle is Idle.PAUSE:
            self.pause()
        elif self.spec.idle is Idle.STOP:
            await self.stop()
        self.is_resting = self.spec.idle is not Idle.LEAVE

    async def wake(self) -> None:
        """Resumes or starts the server and waits until it answers."""
        if self.spec.idle is Idle.PAUSE:
            self.resume()
        await self.start()

    def pause(self) -> None:
        """Stops all its processes with SIGSTOP."""
        pausing.pause(self.pids)

    def resume(self) -> None:
        pausing.resume(self.pids())

    async def stop(self) -> None:
        """Ends a started command with all its processes; no effect on other servers."""
        if self._keeper is None:
            return
        left = self._keeper
        if left.poll() is None:
            left.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S + 2 * keeper.KILL_S
        while left.poll() is None:
            if time.monotonic() > deadline_s:
                pausing.signal_all([*keeper.descendants(left.pid), left.pid], signal.SIGKILL)
            await asyncio.sleep(_POLL_S / 4)
        self._keeper = None

    def _spawn(self, command: str) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        wrapper = [sys.executable, "-I", keeper.__file__, str(os.getpid()), str(GRACE_S)]
        mode, self._log_mode = self._log_mode, "ab"
        with self.log_path.open(mode) as log:
            self._keeper = subprocess.Popen(
                [*wrapper, *shlex.split(command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.spec.env},
                cwd=self.spec.cwd,
                start_new_session=True,
            )

    def _log_end(self) -> str:
        if self.spec.command is None:
            return "start it, or correct the address."
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES_SHOWN))
            lines = log.read(_LOG_BYTES_SHOWN).decode(errors="replace").splitlines()
            last = [plain(line.rstrip()) for line in lines[-LOG_LINES_SHOWN:]]
            return f"the end of {self.log_path}:\n" + "\n".join(last)
        return f"{self.log_path} cannot be read."


async def is_ready(url: str, headers: Mapping[str, str], *, insecure: bool = False) -> bool:
    """Whether a server answers, by its health endpoint or else by its list of models."""
    if url.startswith("grpc://"):
        return await _is_serving(urlsplit(url).netloc)
    if not url.startswith(("http://", "https://")):
        return True  # in process
    import aiohttp

    base = base_of(url)
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for page in ("/health", "/v1/models"):
                async with session.get(
                    base + page, ssl=not insecure, allow_redirects=False
                ) as answer:
                    if answer.status not in _NO_SUCH_PAGE and not 300 <= answer.status < 400:
                        return answer.status == _HTTP_OK
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
    return False


def base_of(url: str) -> str:
    """An OpenAI address without its version."""
    return url.rstrip("/").removesuffix("/v1")


async def _is_serving(address: str) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _free_port() -> int:
    for port in random.sample(_PORTS, _TRIES):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ServerError(
        f"none of {_TRIES} ports from {_PORTS.start} to {_PORTS.stop} is free; "
        "end what listens there."
    )
