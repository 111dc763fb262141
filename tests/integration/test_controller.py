"""A server without gateways of its own: replicas published on TCP for guests."""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

import pytest
from cluster_tools import START_S, ServeProcess
from waits import wait_until

from outrider.gateway.routing.replicas import ReplicaLinks
from outrider.links.aio import AsyncChannel, open_channel
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import (
    OperationResult,
    ReplicaPlace,
    ReplicaState,
    ReplicaTable,
    ScaleTo,
    Welcome,
)
from outrider.links.gateway_messages import EngineFacts
from outrider.links.rank_messages import Hello, Role

pytestmark = [pytest.mark.model]

SECRET = "a secret of the tests"
TIMEOUT_S = 60.0


class Pair(Protocol):
    """Folders of checkpoints; see `conftest.py`."""

    target: Any
    draft: Any


async def _places(
    channel: AsyncChannel, wanted: Callable[[tuple[ReplicaPlace, ...]], bool]
) -> tuple[ReplicaPlace, ...]:
    """The first that are so."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            heard = await channel.receive()
            if isinstance(heard, ReplicaTable) and wanted(heard.places):
                return heard.places


async def _accept(facts: EngineFacts) -> None: ...


async def _take_note() -> None: ...


def test_a_guest_hears_of_replicas_it_can_reach_and_orders_more_of_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_SECRET", SECRET)
    arguments = ["--no-ray", "--processes", "0", "--listen", "127.0.0.1:0", "--admin-port", "0"]
    arguments += ["--model", str(pair.target), "--draft-model", str(pair.draft)]
    arguments += ["--set", "cluster.colocate=true", "--set", "cache.kv_cache_gb=0.01"]

    async def visit(server: ServeProcess, address: str) -> None:
        hello = Hello(Role.GATEWAY, 0, 0, os.getpid(), socket.gethostname())
        channel = await open_channel(f"tcp:{address}", SECRET, hello, FLEET_CODEC, TIMEOUT_S)
        linked = ReplicaLinks(SECRET, _accept, _take_note)
        try:
            welcome = await channel.receive()
            assert isinstance(welcome, Welcome) and welcome.settings == {}
            [place] = await _places(channel, lambda found: len(found) == 1)
            assert [each.rpartition(":")[0] for each in place.addresses] == ["tcp:127.0.0.1"]
            await linked.publish(welcome.controller, [place])
            wait_s = asyncio.timeout(TIMEOUT_S)
            async with wait_s:
                while not linked.is_any_usable:
                    await linked.changed.wait()

            channel.send(ScaleTo(1, 2))
            while not isinstance(answer := await channel.receive(), OperationResult):
                pass
            assert answer == OperationResult(1)
            serving = ReplicaState.SERVING
            await _places(channel, lambda found: [each.state for each in found] == [serving] * 2)
            server.terminate()
            draining = ReplicaState.DRAINING
            await _places(channel, lambda found: {each.state for each in found} == {draining})
        finally:
            channel.close()
            await linked.stop()

    with ServeProcess(*arguments) as server:
        wait_until(lambda: "Ctrl-C stops it" in server.output or not server.is_running, START_S)
        assert "Gateways that connect serve it" in server.output, server.output
        assert "for gRPC" not in server.output
        admin = server._found(r"listening for probes on http://(\S+)")
        with urllib.request.urlopen(f"http://{admin}/readyz", timeout=10) as answer:
            assert answer.status == 200
        with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as answer:
            assert b'outrider:engine_up{replica="0"} 1.0' in answer.read()
        asyncio.run(visit(server, server._found(r"replicas are published on (\S+)")))
        assert server.wait() == 0, server.output
        server.wait_nothing_left()
        assert server.left_files() == []
