"""Servers under test: started, waited for, put to rest while others are measured, and stopped."""

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

from outrider.bench.load.plain import plain
from outrider.bench.load.servers import keeper, pausing
from outrider.bench.load.servers.processes import listening_pid
from outrider.bench.load.targets.registry import split_address
from outrider.errors import ConfigError, OutriderError

START_S = 600.0  # for a command, and for a server that has answered before
REACH_S = 5.0  # for one that is said to run already
GRACE_S = 20.0  # from SIGTERM to SIGKILL
LOG_LINES_SHOWN = 15
_LOG_BYTES_SHOWN = 16 * 1024
_UNFIT_FOR_FILES = re.compile(r"[^\w.-]")
_MOST_NAME_CHARS = 60
_PORT = "{port}"
# Below those the system hands out: a client's connection must not take the port of a server that
# is stopped between its turns.
_PORTS = range(20_000, 32_000)
_TRIES = 200
_POLL_S = 0.2
_ASK_S = 2.0
_HTTP_OK = 200
_NO_SUCH_PAGE = (401, 403, 404, 405, 501)  # nothing is said about whether it is ready


class ServerError(OutriderError):
    """A server did not start, ended too early or does not answer."""


class Idle(StrEnum):
    """What is done with a server while another is measured."""

    LEAVE = "leave"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class IdleRule:
    idle: Idle
    reason: str


def idle_rule(command: str | None, *, is_alone: bool) -> IdleRule:
    """What to do with a server of a run when it is not measured, and why."""
    if command is None:
        return IdleRule(Idle.LEAVE, "only its address was given, so it is left as it is")
    if is_alone:
        return IdleRule(Idle.LEAVE, "all arms share it, so it never rests")
    if "outrider" in command and "serve" in shlex.split(command):
        reason = "Outrider takes a paused process for a lost one, so it is stopped between turns"
        return IdleRule(Idle.STOP, reason)
    return IdleRule(Idle.PAUSE, "its processes are paused between turns")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """`{port}` in address and command stands for a free port, chosen when it starts."""

    name: str
    url: str  # as a target's
    command: str | None = None  # split as a shell would, but run without one; None: it runs already
    env: Mapping[str, str] = field(default_factory=dict)  # added to the harness's own
    cwd: Path | None = None
    ready_timeout_s: float | None = None  # None: START_S for what is being started, else REACH_S
    idle: Idle = Idle.LEAVE
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    insecure: bool = False  # do not check the certificate

    def __post_init__(self) -> None:
        split_address(self.url.replace(_PORT, "1"))  # a wrong one would be waited for
        if self.command is None:
            wrong = f"the address {self.url!r} has {_PORT}, but nothing is to be started"
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
        """The key in the headers, for clients that send it in another way."""
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        return key if kind == "Bearer" and key else None


class Server:
    """One server of a run. All methods are for one event loop; `stop` may be called at any time.

    Nothing of a started command outlives `stop`, or the harness, however that ends.
    """

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        self.spec = spec
        name = _UNFIT_FOR_FILES.sub("_", spec.name)[:_MOST_NAME_CHARS]
        self.log_path = folder / f"server-{name}.log"
        self.is_resting = False
        port = _free_port() if _PORT in f"{spec.url}{spec.command}" else 0
        # Kept when it is started again, for clients know it by then.
        self.url = spec.url.replace(_PORT, str(port))
        self.command = spec.command and spec.command.replace(_PORT, str(port))
        self._keeper: subprocess.Popen[bytes] | None = None
        self._found: int | None = None
        self._has_answered = False
        self._log_mode: Literal["wb", "ab"] = "wb"  # what an earlier run has said is not this one's

    @property
    def is_running(self) -> bool:
        """Whether the command does, where the harness has started one."""
        return self._keeper is not None and self._keeper.poll() is None

    @property
    def root_pid(self) -> int | None:
        """The process below which all those of a local server are; None where it is not known.

        Of a started one it is the keeper, which is no part of it.
        """
        if self.spec.command is not None:
            return self._keeper.pid if self._keeper is not None and self.is_running else None
        if self._found is None or not Path(f"/proc/{self._found}").exists():
            self._found = listening_pid(self.url)
        return self._found

    def pids(self) -> list[int]:
        """The processes of a local server, parents before children; none where not known."""
        root = self.root_pid
        if root is None:
            return []
        return ([] if self.is_running else [root]) + keeper.descendants(root)

    async def start(self) -> None:
        """Start the command, if there is one, and wait until the server answers."""
        if self.command is not None and not self.is_running:
            self._spawn(self.command)
        self.is_resting = False
        try:
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise

    async def wait_ready(self) -> None:
        patience_s = self._patience_s()
        deadline_s = time.monotonic() + patience_s
        while not await is_ready(self.url, self.spec.headers, insecure=self.spec.insecure):
            if self._keeper is not None and (code := self._keeper.poll()) is not None:
                raise ServerError(
                    f"server {self.spec.name} ended with code {code} before it answered at "
                    f"{self.url}; {self._log_end()}"
                )
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"server {self.spec.name} does not answer at {self.url} within "
                    f"{patience_s:g} s; {self._log_end()}"
                )
            await asyncio.sleep(_POLL_S)
        self._has_answered = True

    def _patience_s(self) -> float:
        """One that nobody has started is most likely at another address."""
        if self.spec.ready_timeout_s is not None:
            return self.spec.ready_timeout_s
        return START_S if self.command is not None or self._has_answered else REACH_S

    async def rest(self) -> None:
        """Others are measured now: do what `spec.idle` says."""
        if self.spec.idle is Idle.PAUSE:
            self.pause()
        elif self.spec.idle is Idle.STOP:
            await self.stop()
        self.is_resting = self.spec.idle is not Idle.LEAVE

    async def wake(self) -> None:
        """It is measured next; returns when it answers."""
        if self.spec.idle is Idle.PAUSE:
            self.resume()
        await self.start()

    def pause(self) -> None:
        """Stop all its processes where they are."""
        pausing.pause(self.pids)

    def resume(self) -> None:
        pausing.resume(self.pids())

    async def stop(self) -> None:
        """End a started command with all its processes; has no effect on others."""
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
    """Whether a server answers requests: by its health, else by the list of its models."""
    if url.startswith("grpc://"):
        return await _is_serving(urlsplit(url).netloc)
    if not url.startswith(("http://", "https://")):
        return True  # in process
    import aiohttp

    base = base_of(url)
    timeout = aiohttp.ClientTimeout(total=_ASK_S)
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
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ASK_S)
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
