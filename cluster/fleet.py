"""The gateways of a server: processes that share its ports, each started anew when it is lost."""

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
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.fleet_desk import DRAINING, SERVING, Answers, Desk, Member
from outrider.engine.launch.child import environment_without_settings
from outrider.engine.launch.restarts import Restarts
from outrider.gateway.metrics_page import FOLDER_VARIABLE, forget_process
from outrider.links.address import listen
from outrider.links.cluster_view import ProcessView
from outrider.links.fleet_messages import Stop
from outrider.links.frames import LinkError
from outrider.links.secret import SECRET_VARIABLE

START_S = 120.0  # for a gateway to listen
END_S = 3.0  # for a gateway to end, after running requests have had their time
DRAINING_S = 1.0  # for all to say that they refuse new requests
ROLE = "gateway"


class Fleet:
    """`keep` them, and `stop` them in the end; `close` in any case. There may be none, and guests
    that dial in where `door` listens, which are started elsewhere."""

    def __init__(
        self,
        size: int,
        settings: Mapping[str, Any],
        secret: str,
        answers: Answers,
        say: Say,
        door: socket.socket | None = None,
    ) -> None:
        self._size = size
        self._door = door
        self._say = say
        self._folder: Path | None = None
        self.metrics_folder: Path | None = None  # where they put what they count
        self._address = ""  # where they dial in
        self._secret = secret
        self.desk = Desk(settings, self._secret, answers)
        self.desk.on_change.append(self._hear)
        self._stopping = asyncio.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = {index: Restarts() for index in range(size)}
        self._num_restarts = dict.fromkeys(range(size), 0)
        self._listening: set[int] = set()  # those that have come so far in this life
        self._keepers: list[asyncio.Task[None]] = []

    # -- how they fare ------------------------------------------------------------------------

    @property
    def num_serving(self) -> int:
        """Gateways that answer requests now."""
        return sum(member.state == SERVING for member in self.desk.members.values())

    @property
    def num_active(self) -> int:
        """Requests in hand, as last told."""
        return sum(member.num_active for member in self.desk.members.values())

    async def wait_serving(self) -> Member | None:
        """Until all of them answer requests; one of them, if there is any. Whoever calls minds the
        time."""
        await self.desk.wait_until(lambda: self.num_serving == self._size)
        return self.desk.members[0] if self._size else None

    def view(self) -> list[ProcessView]:
        return [self._view_of(index) for index in range(self._size)]

    def _view_of(self, index: int) -> ProcessView:
        member, process = self.desk.members.get(index), self._processes.get(index)
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

    async def keep(self) -> None:
        """Until `stop`; raises if one never came to listen."""
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-gateways-"))
        self.metrics_folder = self._folder / "metrics"
        self.metrics_folder.mkdir()
        self._address = f"unix:{self._folder}/keeper.sock"
        with listen(self._address) as listener:
            doors = [listener] if self._door is None else [listener, self._door]
            desks = [asyncio.create_task(self.desk.run(door)) for door in doors]
            self._keepers = [asyncio.create_task(self._keep(i)) for i in range(self._size)]
            try:
                await asyncio.gather(self._stopping.wait(), *self._keepers)
            finally:
                for task in (*self._keepers, *desks):
                    task.cancel()
                self.kill()

    async def drain(self) -> None:
        """Have all of them refuse new requests; `num_active` is true of that moment."""
        self.desk.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAINING_S):
                await self.desk.wait_until(self._are_draining)

    def _are_draining(self) -> bool:
        return all(member.state == DRAINING for member in self.desk.members.values())

    async def stop(self, drain_s: float) -> None:
        """Running requests get so long."""
        self._stopping.set()
        processes = dict(self._processes)
        for index, process in processes.items():
            member = self.desk.members.get(index)
            if member is None:
                process.kill()  # it has nothing in hand
            else:
                member.tell(Stop(drain_s))
        ends = [asyncio.create_task(_end_of(process)) for process in processes.values()]
        if ends:
            await asyncio.wait(ends, timeout=drain_s + END_S)
        self.kill()
        if ends:
            await asyncio.wait(ends, timeout=END_S)

    def kill(self) -> None:
        """All of them, at once."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, index: int) -> None:
        restarts = self._restarts[index]
        while not self._stopping.is_set():
            reason = await self._run(index)
            if self._stopping.is_set():
                return
            if reason is None:
                continue
            if restarts.is_first:
                raise ClusterError(f"{self._name(index)} cannot serve: {reason}")
            pause_s = restarts.lost()
            self._num_restarts[index] += 1
            words = f"{self._name(index)} was lost: {reason.rstrip('.')}"
            self._say(Event(Kind.TROUBLE, f"{words}; it is started anew in {pause_s:g} s"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run(self, index: int) -> str | None:
        """One life of a gateway; why it ended, or None where a Ctrl-C met it before it had left the
        terminal: the server has heard the same one, and says what is to be done."""
        command = [sys.executable, "-m", "outrider.gateway", "--keeper", self._address]
        process = self._processes[index] = subprocess.Popen(
            [*command, "--index", str(index)],
            env=environment_without_settings()
            | {SECRET_VARIABLE: self._secret, FOLDER_VARIABLE: str(self.metrics_folder)},
            stdin=subprocess.DEVNULL,
            # Not the terminal's: whether Ctrl-C is to end it is for the server to say.
            start_new_session=True,
        )
        late = asyncio.get_running_loop().call_later(START_S, self._kill_unless_there, index)
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
        if code == -signal.SIGINT:  # those that run answer it
            return None
        return self.desk.failures.pop(index, f"its process ended with exit code {code}")

    def _kill_unless_there(self, index: int) -> None:
        member = self.desk.members.get(index)
        if member is None or member.listening is None:
            self.desk.failures[index] = f"it did not listen within {START_S:g} s"
            self._processes[index].kill()

    def _hear(self, member: Member, failure: LinkError | None) -> None:
        restarts = self._restarts.get(member.index)
        process = self._processes.get(member.index)
        if restarts is None or process is None or process.pid != member.pid:
            return
        if failure is not None:
            # It ends by itself or hangs.
            asyncio.get_running_loop().call_later(END_S, process.kill)
        elif member.listening is not None and member.index not in self._listening:
            self._listening.add(member.index)
            is_first, away_s = restarts.is_first, restarts.runs()
            if not is_first:
                back = f"{self._name(member.index)} back after {away_s:.1f} s (pid {member.pid})"
                self._say(Event(Kind.REPAIR, back))

    def _name(self, index: int) -> str:
        return "the gateway" if self._size == 1 else f"gateway {index}"


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Its exit code."""
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
