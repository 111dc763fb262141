"""The ways out of `outrider serve`, and what is none: the loss of whoever reads what it prints."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
from typing import Any

import pytest
from cluster_tools import ServeProcess
from waits import wait_until

from outrider.client import Client
from outrider.config import ServerConfig

pytestmark = [pytest.mark.model]

MODEL = "smollm2-135m-draft"
DRAIN_S = ServerConfig().drain_s
ONE_PROCESS = ["--no-ray", "--model", MODEL, "--set", "cluster.colocate=true"]
QUICK: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "timeout_s": 60}
LONG: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "timeout_s": 60}
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "timeout_s": 60}


def _engine_pid(client: Client) -> int:
    engine = client.status().engine
    assert engine is not None
    return engine.models[0].pid


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def test_nobody_needs_to_read_what_a_server_prints_until_its_terminal_closes() -> None:
    port = _free_port()
    with ServeProcess(*ONE_PROCESS, "--grpc-port", str(port)) as server:
        server.wait_line("^outrider")
        server.stop_reading()
        with Client(f"127.0.0.1:{port}") as client:
            client.wait_ready(60)
            pid = _engine_pid(client)
            with client.stream("Once", **LONG) as stream:
                next(iter(stream))
                os.kill(pid, signal.SIGKILL)  # which is told, to nobody
                assert stream.result().usage.completion_tokens == LONG["max_tokens"]
        server.hang_up()
        assert server.wait(DRAIN_S) == 0
        server.wait_nothing_left()
        assert server.left_files() == []


def test_a_server_that_is_killed_takes_gateways_and_engine_along_and_leaves_no_folder() -> None:
    several = ["--processes", "2", "--admin-port", "0"]
    with ServeProcess(*ONE_PROCESS, *several) as server, server.wait_ready() as client:
        for path in ("/livez", "/readyz"):
            assert _get(server.admin_address, path)[0] == 200
        assert _get(server.http_address, "/readyz")[0] == 200
        client.generate("Once", **QUICK)
        status, page = _get(server.admin_address, "/metrics")
        assert status == 200
        assert re.search(r"^outrider:generation_tokens_total\{.*\} 4\.0$", page, re.MULTILINE), page
        cluster = client.status().cluster
        assert cluster is not None
        assert [each.role for each in cluster.processes] == ["gateway", "gateway", "engine"]
        with client.stream("Once", **ENDLESS) as stream:
            next(iter(stream))
            server.kill()
            server.wait()
            server.wait_nothing_left(30)
            wait_until(lambda: server.left_files() == [], 10, lambda: str(server.left_files()))


def test_a_server_that_is_stopped_while_ray_starts_leaves_nothing() -> None:
    with ServeProcess("--model", MODEL) as server:
        server.wait_line("checked")
        server.interrupt()
        server.wait_line("stopping")
        assert server.wait(30) == 0
        assert "Ray started" not in server.output
        server.wait_nothing_left()
        assert server.left_files() == []


def _get(address: str, path: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_with_nohup_it_survives_its_terminal_and_a_second_sigterm_ends_it_at_once() -> None:
    with ServeProcess(*ONE_PROCESS, is_nohup=True) as server, server.wait_ready() as client:
        pid = _engine_pid(client)
        server.hang_up()
        with client.stream("Once", **ENDLESS) as stream:
            next(iter(stream))
            assert _engine_pid(client) == pid
            server.terminate()
            server.wait_line("stopping: 1 running request gets")
            server.terminate()
            assert server.wait(DRAIN_S / 2) == 128 + signal.SIGTERM
        server.wait_nothing_left()
        assert server.left_files() == []
