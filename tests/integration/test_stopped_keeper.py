"""A keeper that is stopped (SIGSTOP) but alive: its gateway serves on, and ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_engine import SECRET, FakeEngine
from metrics_tools import Page, get
from process_tools import is_alive
from waits import wait_until

from outrider.client import Client

SILENCE_S = 2.0  # in place of the default
# Keeps one gateway; for each line of its input it says how that one is.
KEEPER = """
import asyncio, sys
from outrider.cluster.fleet import Fleet
from outrider.cluster.fleet_registry import FleetHandlers
from outrider.config import EngineConfig, ServerConfig
from outrider.gateway.ports import ReservedPorts
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState

async def view():
    return None

async def main(engine, secret, ports):
    values = EngineConfig(server=ports.config, log_level="warning").to_settings()
    settings = {p: v for p, v in values.items() if p.startswith(("server.", "log_"))}
    fleet = Fleet(1, settings, secret, FleetHandlers(view, print, print), print)
    fleet.registry.publish((ReplicaPlace("0", (engine,), ReplicaState.SERVING),))
    keeping = asyncio.create_task(fleet.run())
    member = await fleet.wait_serving()
    print(member.listening.http_address, member.listening.grpc_address, flush=True)
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            gateway = fleet.view()[0]
            print(gateway.pid, gateway.restarts, fleet.num_serving, flush=True)
    finally:
        await fleet.stop(0.0)
        fleet.close()
        keeping.cancel()

with ReservedPorts(ServerConfig(port=0, grpc_port=0, processes=1)) as ports:
    asyncio.run(main(*sys.argv[1:], ports))
"""


class Keeper:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.http, self.grpc = self._line().split()
        self.gateway_pid = self.ask()[0]

    def ask(self) -> tuple[int, int, int]:
        """The gateway's process, its restarts and how many serve."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        pid, restarts, serving = map(int, self._line().split())
        return pid, restarts, serving

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    (tmp_path / "sitecustomize.py").write_text(
        f"from outrider.links import channel\nchannel.SILENCE_S = {SILENCE_S}\n"
    )
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock", step_s=0.02).start()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, engine.address, SECRET],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    gateway_pid = 0
    try:
        running = Keeper(process)
        gateway_pid = running.gateway_pid
        yield running
    finally:
        process.kill()
        process.communicate(timeout=60)
        engine.stop()
        if gateway_pid:
            wait_until(lambda: not is_alive(gateway_pid))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_gateway_serves_on_while_its_keeper_is_stopped(keeper: Keeper, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Client(keeper.grpc) as client:
        client.wait_ready(60)
        with stopped(keeper.process.pid):
            wait_until(lambda: "is silent; this gateway serves on" in log.read_text())
            until_s = time.monotonic() + SILENCE_S  # it would have ended meanwhile
            while time.monotonic() < until_s:
                assert len(client.generate([5, 6, 7], max_tokens=4).token_ids) == 4
            began_s = time.monotonic()
            status, page = get(keeper.http, "/metrics")
            assert status == 200 and Page(page.decode())["outrider:gateway_processes"] == 1
            assert time.monotonic() - began_s < 4, "nobody waits for a keeper that is silent"
        wait_until(lambda: "the controller is back" in log.read_text())
        assert keeper.ask() == (keeper.gateway_pid, 0, 1)
        assert len(client.generate([5, 6, 7], max_tokens=4).token_ids) == 4
    assert not re.search("Traceback|lost", log.read_text())


def test_a_gateway_ends_with_a_keeper_that_dies_while_it_is_stopped(keeper: Keeper) -> None:
    os.kill(keeper.process.pid, signal.SIGSTOP)
    keeper.process.kill()
    wait_until(lambda: not is_alive(keeper.gateway_pid))
