"""A controller's process is lost: the next one adopts the replicas, and streams go on uncut."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import START_S, ServeProcess
from free_ports import free_port
from ray_heads import RayHead, ray_head
from waits import stretched, wait_until

from outrider.client import Client
from outrider.errors import OutriderError

pytestmark = [pytest.mark.ray, pytest.mark.model]

SECRET = {"OUTRIDER_SECRET": "a secret of the tests"}
MODEL = "smollm2-135m-draft"
PROMPT = "The sea was"
GREEDY: dict[str, Any] = {"max_tokens": 500, "temperature": 0.0, "ignore_eos": True}
SETTINGS = (
    "server.drain_s=1",
    "cluster.colocate=true",
    "cluster.standby=false",
    "cache.kv_cache_gb=0.1",
)
NUM_BEFORE = 20  # tokens
LATE_S = 90.0


def controller(head: RayHead, port: int, *words: str) -> ServeProcess:
    settings = [word for each in SETTINGS for word in ("--set", each)]
    places = ("--address", head.address, "--listen", f"127.0.0.1:{port}", "--admin-port", "0")
    return ServeProcess(
        "--model", MODEL, *places, *settings, *words, command="controller", environment=SECRET
    )


def gateway(port: int, grpc_port: int) -> ServeProcess:
    places = ("--controllers", f"127.0.0.1:{port}", "--grpc-port", str(grpc_port))
    words = ("--set", "log_level=info")
    return ServeProcess(*places, *words, command="gateway", environment=SECRET)


def answers(client: Client) -> bool:
    try:
        return bool(client.generate(PROMPT, max_tokens=1, timeout_s=10).text is not None)
    except OutriderError:
        return False


def wait_serving(server: ServeProcess) -> None:
    wait_until(lambda: "Ctrl-C stops it" in server.output or not server.is_running, START_S)
    assert "Ctrl-C stops it" in server.output, server.output


class Stream:
    """One request, read in a thread."""

    def __init__(self, client: Client) -> None:
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self._client = client
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self._client.stream(PROMPT, timeout_s=stretched(200), **GREEDY) as stream:
                for chunk in stream:
                    self.tokens += chunk.token_ids
        except BaseException as error:  # told by `result`
            self.error = error

    def begun(self) -> Stream:
        wait_until(lambda: len(self.tokens) >= NUM_BEFORE or self.error is not None, LATE_S)
        return self

    def result(self) -> list[int]:
        self._thread.join(stretched(LATE_S))
        assert not self._thread.is_alive() and self.error is None, self.error
        return self.tokens


def test_the_next_controller_adopts_what_runs_and_only_one_directs_it() -> None:
    port, grpc_port = free_port(), free_port()
    with ray_head(4) as head, gateway(port, grpc_port) as guest, controller(head, port) as first:
        wait_serving(first)
        [engine] = head.actor_pids("EngineActor")
        with Client(f"127.0.0.1:{grpc_port}") as client:
            wait_until(lambda: answers(client), LATE_S, lambda: guest.output)
            expected = Stream(client).result()
            stream = Stream(client).begun()
            first.kill()
            began_s = time.monotonic()
            first.wait()
            with controller(head, port) as second:
                second.wait_line("adopted the running replicas of", LATE_S)
                print(f"adopted {time.monotonic() - began_s:.1f} s after the kill")
                assert stream.result() == expected
                wait_serving(second)
                assert head.actor_pids("EngineActor") == [engine]
                assert Stream(client).result() == expected
                assert "resum" not in guest.output  # it was never taken to another engine
                _only_one_directs(head, second, engine)
        guest.terminate()
        assert guest.wait() == 0, guest.output


def _only_one_directs(head: RayHead, second: ServeProcess, engine: int) -> None:
    with controller(head, free_port()) as refused:
        assert refused.wait(LATE_S) == 2, refused.output
        assert "a server already runs in this cluster" in refused.output
        assert f"pid {second.pid}" in refused.output
    os.kill(second.pid, signal.SIGSTOP)
    with controller(head, free_port()) as third:
        wait_serving(third)
        os.kill(second.pid, signal.SIGCONT)
        # Which it notices first depends on the machine: its successor, or that it was away.
        assert second.wait(LATE_S) in (1, 2), second.output
        taken = f"directed by {socket.gethostname()}, pid {third.pid}"
        assert "taken over by another server" in second.output or taken in second.output
        assert head.actor_pids("EngineActor") == [engine]
        third.terminate()
        assert third.wait() == 0, third.output
    wait_until(lambda: not Path(f"/proc/{engine}").exists(), LATE_S)


@pytest.mark.slow
def test_changed_settings_are_rolled_out_and_another_model_is_started_anew() -> None:
    with ray_head(6) as head, controller(head, free_port()) as first:
        wait_serving(first)
        [engine] = head.actor_pids("EngineActor")
        first.kill()
        first.wait()
        with controller(head, free_port(), "--set", "scheduler.max_num_seqs=3") as second:
            second.wait_line(r"their settings differ: roll out scheduler.max_num_seqs=3", LATE_S)
            second.wait_line("done: roll out scheduler.max_num_seqs=3", START_S)
            [other] = head.actor_pids("EngineActor")
            assert other != engine
            second.kill()
            second.wait()
        same = ("--set", "scheduler.max_num_seqs=3", "--address", head.address)
        settings = [word for each in SETTINGS for word in ("--set", each)]
        with ServeProcess("--model", MODEL, *same, *settings) as own:  # without OUTRIDER_SECRET
            with own.wait_ready() as client:
                assert client.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2
            assert head.actor_pids("EngineActor") == [other]
            own.kill()
            own.wait()
        with controller(head, free_port(), "--set", "num_threads=2") as third:
            third.wait_line("replicas already run and are restarted: num_threads", LATE_S)
            wait_serving(third)
            third.terminate()
            assert third.wait() == 0, third.output
