"""What is decided about servers before any is started."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.loadtest.servers.server import (
    Idle,
    ServerSpec,
    ServerUnderTest,
    base_of,
    idle_rule,
    is_ready,
)

VLLM = """vllm serve m --port {port} --speculative-config '{"method": "ngram"}'"""


@pytest.mark.parametrize(
    ("command", "is_alone", "idle"),
    [
        (None, False, Idle.LEAVE),
        (VLLM, False, Idle.PAUSE),
        (VLLM, True, Idle.LEAVE),
        ("outrider serve --port 0 --grpc-port {port}", False, Idle.STOP),
        ("python -m outrider serve --port 0 --grpc-port {port}", False, Idle.STOP),
        ("python -m outrider.loadtest.fake_server {port}", False, Idle.PAUSE),
    ],
)
def test_what_a_resting_server_does_depends_on_who_started_it(
    command: str | None, is_alone: bool, idle: Idle
) -> None:
    rule = idle_rule(command, is_alone=is_alone)
    assert rule.idle is idle
    assert rule.reason


def test_a_port_stands_in_address_and_command_and_other_braces_stay(tmp_path: Path) -> None:
    server = ServerUnderTest(ServerSpec("v", "http://127.0.0.1:{port}/v1", VLLM), tmp_path)
    port = server.url.rpartition(":")[2].removesuffix("/v1")
    assert 20_000 <= int(port) < 32_000
    assert server.command is not None
    assert f"--port {port} " in server.command
    assert '{"method": "ngram"}' in server.command
    assert server.pids() == [] and not server.is_running


def test_a_server_that_runs_already_is_found_by_where_it_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = ServerUnderTest(ServerSpec("here", url), tmp_path)
        assert server.root_pid == os.getpid()
        assert os.getpid() in server.pids()
    assert ServerUnderTest(ServerSpec("gone", url), tmp_path).root_pid is None
    assert ServerUnderTest(ServerSpec("far", "http://192.0.2.1:80"), tmp_path).root_pid is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"url": "http://h:{port}"}, "there is no command to start; give the port"),
        ({"url": "http://h:1", "idle": Idle.PAUSE}, "idle is 'pause'"),
        ({"url": "http://h:1", "command": "vllm 'serve"}, "cannot be split"),
        ({"url": "http://h:1", "command": " "}, "the command is empty"),
    ],
)
def test_a_wrong_description_is_refused_with_its_reason(spec: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerSpec("s", **spec)  # type: ignore[arg-type]


def test_nobody_listening_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert not asyncio.run(is_ready(f"http://127.0.0.1:{port}/v1", {}))
    assert not asyncio.run(is_ready(f"grpc://127.0.0.1:{port}", {}))


def test_the_base_of_an_address_is_without_its_version() -> None:
    assert base_of("http://h:1/v1/") == base_of("http://h:1") == "http://h:1"
