"""The gateways of a server: processes that share its ports, each restarted when lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.fleet_registry import (
    DRAINING,
    SERVING,
    FleetHandlers,
    FleetRegistry,
    GatewayMember,
)
from outrider.engine.launch.child import environment_without_settings
from outrider.gateway.metrics.page import FOLDER_VARIABLE, forget_process
from outrider.links.address import listen
from outrider.links.cluster_view import ProcessView
from outrider.links.fleet_messages import StopGateway
from outrider.links.frames import LinkError
from outrider.links.secret import SECRET_VARIABLE
from outrider.restarts import Restarts

START_S = 120.0  # for a gateway to listen
END_S = 3.0  # for a gateway to end, after requests have drained
DRAINING_S = 1.0  # for all gateways to confirm that they drain
ROLE = "gateway"


class Fleet:
    """Supervises the gateways: `run`, then `stop`; `close` in any case. The size may be 0: gateways
    of other hosts then connect to `listener`."""

    def __init__(
        self,
        size: int,
        settings: Mapping[str, Any],
        secret: str,
        handlers: FleetHandlers,
        say: Say,
        listener: socket.socket | None = None,
    ) -> None:
        self._size = size
        self._listener = listener
        self._say = say
        self._folder: Path | None = None
        self.metrics_folder: Path | None = None  # of their metric files
        self._address = ""  # that they connect to
        self._secret = secret
        self.registry = FleetRegistry(settings, self._secret, handlers)
        self.registry.on_change.append(self._on_member_change)
        self._stopping = asyncio.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = {index: Restarts() for index in range(size)}
        self._num_restarts = dict.fromkeys(range(size), 0)
        self._listening: set[int] = set()  # by index, since their last restart
        self._supervisors: list[asyncio.Task[None]] = []

    # -- state --------------------------------------------------------------------------------

    @property
    def num_serving(self) -> int:
        """Gateways that answer requests now."""
        return sum(member.state == SERVING for member in self.registry.members.values())

    @property
    def num_active(self) -> int:
        """Running requests, as last reported."""
        return sum(member.num_active for member in self.registry.members.values())

    async def wait_serving(self) -> GatewayMember | None:
        """Wait until all gateways serve; returns one of them, if any. Has no timeout of its own."""
        await self.registry.wait_until(lambda: self.num_serving == self._size)
        return self.registry.members[0] if self._size else None

    def view(self) -> list[ProcessView]:
        return [self._view_of(index) for index in range(self._size)]

    def _view_of(self, index: int) -> ProcessView:
        member, process = self.registry.members.get(index), self._processes.get(index)
        is_ready = member is not None and member.listening is not None
        state = "ready" if is_ready else "starting" if process is not None else "lost"
        return ProcessView(
            ROLE,
            index,
            0 if process is None else process.pid,
            os.uname().nodename if member is None else member.host,
            (),
            self._num_restarts[index],
            state,
        )

    # -- life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until `stop`. Raises if the first start of a gateway fails."""
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-gateways-"))
        self.metrics_folder = self._folder / "metrics"
        self.metrics_folder.mkdir()
        self._address = f"unix:{self._folder}/keeper.sock"
        with listen(self._address) as own:
            listeners = [own] if self._listener is None else [own, self._listener]
            servers = [asyncio.create_task(self.registry.run(each)) for each in listeners]
            self._supervisors = [asyncio.create_task(self._supervise(i)) for i in range(self._size)]
            try:
                await asyncio.gather(self._stopping.wait(), *self._supervisors)
            finally:
                for task in (*self._supervisors, *servers):
                    task.cancel()
                self.kill()

    async def drain(self) -> None:
        """Have all gateways refuse new requests; `num_active` is exact afterwards."""
        self.registry.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAINING_S):
                await self.registry.wait_until(self._are_draining)

    def _are_draining(self) -> bool:
        return all(member.state == DRAINING for member in self.registry.members.values())

    async def stop(self, drain_s: float) -> None:
        """End all gateways; running requests get `drain_s` to finish."""
        self._stopping.set()
        processes = dict(self._processes)
        for index, process in processes.items():
            member = self.registry.members.get(index)
            if member is None:
                process.kill()  # it has no requests
            else:
                member.send(StopGateway(drain_s))
        ends = [asyncio.create_task(_end_of(process)) for process in processes.values()]
        if ends:
            await asyncio.wait(ends, timeout=drain_s + END_S)
        self.kill()
        if ends:
            await asyncio.wait(ends, timeout=END_S)

    def kill(self) -> None:
        """Kill all gateways at once."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _supervise(self, index: int) -> None:
        restarts = self._restarts[index]
        while not self._stopping.is_set():
            reason = await self._run_once(index)
            if self._stopping.is_set():
                return
            if reason is None:
                continue
            if restarts.is_first:
                raise ClusterError(f"{self._name(index)} cannot serve: {reason}")
            pause_s = restarts.lost()
            self._num_restarts[index] += 1
            words = f"{self._name(index)} was lost: {reason.rstrip('.')}"
            self._say(Event(EventKind.TROUBLE, f"{words}; restarting in {pause_s:g} s"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run_once(self, index: int) -> str | None:
        """Run a gateway until it ends; returns the reason. None if a Ctrl-C reached it before it
        left the terminal's process group: the server handles the same signal."""
        command = [sys.executable, "-m", "outrider.gateway", "--keeper", self._address]
        process = self._processes[index] = subprocess.Popen(
            [*command, "--index", str(index)],
            env=environment_without_settings()
            | {SECRET_VARIABLE: self._secret, FOLDER_VARIABLE: str(self.metrics_folder)},
            stdin=subprocess.DEVNULL,
            # In a session of its own: the server, not Ctrl-C, decides when it ends.
            start_new_session=True,
        )
        late = asyncio.get_running_loop().call_later(START_S, self._kill_unless_listening, index)
        try:
            code = await _end_of(process)
        finally:
            late.cancel()
            process.kill()
            process.wait()
            del self._processes[index]
            if self.metrics_folder is not None:
                forget_process(self.metrics_folder, process.pid)
            self._listening.discard(index)
        if code == -signal.SIGINT:  # later the gateway handles SIGINT itself
            return None
        return self.registry.failures.pop(index, f"its process ended with exit code {code}")

    def _kill_unless_listening(self, index: int) -> None:
        member = self.registry.members.get(index)
        if member is None or member.listening is None:
            self.registry.failures[index] = f"it did not listen within {START_S:g} s"
            self._processes[index].kill()

    def _on_member_change(self, member: GatewayMember, failure: LinkError | None) -> None:
        restarts = self._restarts.get(member.index)
        process = self._processes.get(member.index)
        if restarts is None or process is None or process.pid != member.pid:
            return
        if failure is not None:
            # It ends by itself unless it hangs.
            asyncio.get_running_loop().call_later(END_S, process.kill)
        elif member.listening is not None and member.index not in self._listening:
            self._listening.add(member.index)
            is_first, away_s = restarts.is_first, restarts.runs()
            if not is_first:
                back = f"{self._name(member.index)} back after {away_s:.1f} s (pid {member.pid})"
                self._say(Event(EventKind.REPAIR, back))

    def _name(self, index: int) -> str:
        return "the gateway" if self._size == 1 else f"gateway {index}"


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    handle = os.pidfd_open(process.pid)
    try:
        loop.add_reader(handle, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.wait()
