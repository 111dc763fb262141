"""Ray's head is lost and comes back: the server attaches to it, and requests go on."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from cluster_tools import ServeProcess, streamed_tokens
from ray_heads import RayHead, ray_head
from waits import stretched, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m-draft"
PROMPT = "The sea was"
SERVE = ("--model", MODEL, "--admin-port", "0", "--set", "server.drain_s=1")
SETTINGS = ("cluster.colocate=true", "cluster.standby=false", "cache.kv_cache_gb=0.1")
COMMAND = (*SERVE, *(word for each in SETTINGS for word in ("--set", each)))
GREEDY: dict[str, Any] = {"max_tokens": 120, "temperature": 0.0, "ignore_eos": True}
NUM_BEFORE = 20  # tokens
AWAY_S, BACK_S = 120.0, 180.0


def _is_ready(server: ServeProcess) -> bool:
    try:
        url = f"http://{server.admin_address}/readyz"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except urllib.error.URLError as error:
        pytest.fail(f"the server has ended: {error}\n{server.output}")


class Streaming:
    """One request of a server, read in a thread."""

    def __init__(self, server: ServeProcess) -> None:
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self._server = server
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: len(self.tokens) >= NUM_BEFORE or not self._thread.is_alive(), 60)

    def _read(self) -> None:
        try:
            client = self._server.wait_ready()
            with client, client.stream(PROMPT, timeout_s=stretched(300), **GREEDY) as stream:
                for chunk in stream:
                    self.tokens += chunk.token_ids
        except BaseException as error:  # told by `result`
            self.error = error

    def result(self) -> list[int]:
        self._thread.join(stretched(BACK_S))
        assert not self._thread.is_alive(), f"{len(self.tokens)} tokens"
        if self.error is not None:
            raise self.error
        return self.tokens


def test_a_head_that_is_started_anew_is_attached_to_and_requests_go_on() -> None:
    with ray_head(4) as head, ServeProcess(*COMMAND, "--address", head.address) as server:
        with server.wait_ready() as client:
            expected = streamed_tokens(client, PROMPT, **GREEDY)
        assert _is_ready(server)
        streaming = Streaming(server)
        head.lose_gcs()
        head.lose()
        wait_until(lambda: not _is_ready(server), AWAY_S, lambda: server.output)
        head.start()
        began_s = time.monotonic()
        wait_until(lambda: _is_ready(server), BACK_S, lambda: server.output)
        print(f"serving again {time.monotonic() - began_s:.1f} s after Ray's return")
        assert streaming.result() == expected
        server.wait_line("reattaching to Ray, requests wait")
        server.terminate()
        assert server.wait() == 0, server.output


@pytest.mark.slow
def test_a_head_that_is_back_before_its_loss_was_noticed_is_attached_to() -> None:
    with ray_head(4) as head, ServeProcess(*COMMAND, "--address", head.address) as server:
        with server.wait_ready() as client:
            expected = streamed_tokens(client, PROMPT, **GREEDY)
        streaming = Streaming(server)
        lose(head)
        head.start()
        assert streaming.result() == expected
        wait_until(lambda: _is_ready(server), BACK_S, lambda: server.output)


@pytest.mark.slow
def test_a_head_that_is_away_for_longer_than_ray_waits_does_not_end_the_server() -> None:
    """Ray's library ends its process after 60 s unless it is told otherwise."""
    with ray_head(4) as head, ServeProcess(*COMMAND, "--address", head.address) as server:
        server.wait_ready().close()
        head.lose_gcs()
        wait_until(lambda: not _is_ready(server), 2 * AWAY_S, lambda: server.output)
        head.lose()
        assert server.is_running, server.output
        head.start()
        wait_until(lambda: _is_ready(server), BACK_S, lambda: server.output)


def test_a_ray_of_the_server_s_own_that_loses_its_head_is_started_anew() -> None:
    with ServeProcess(*COMMAND) as server:
        with server.wait_ready() as client:
            expected = streamed_tokens(client, PROMPT, **GREEDY)
        streaming = Streaming(server)
        [gcs] = server.pids_of("/gcs_server")
        os.kill(gcs, signal.SIGKILL)
        assert streaming.result() == expected
        server.wait_line("gcs_server on this machine ended; reattaching to Ray")
        server.terminate()
        assert server.wait() == 0, server.output
        server.wait_nothing_left()
        assert server.left_files() == []


def test_a_server_whose_ray_is_lost_ends_when_it_is_told_to() -> None:
    with ray_head(4) as head, ServeProcess(*COMMAND, "--address", head.address) as server:
        server.wait_ready().close()
        lose(head)
        wait_until(lambda: not _is_ready(server), AWAY_S, lambda: server.output)
        server.terminate()
        assert server.wait(60) in (0, 1), server.output


def lose(head: RayHead) -> None:
    head.lose_gcs()
    head.lose()
