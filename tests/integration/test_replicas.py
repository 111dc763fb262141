"""Two replicas on one host: their number, their settings and their lives change while requests run,
and every request gets the tokens of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest
from cluster_tools import ServeProcess
from process_tools import is_alive
from waits import wait_until

from outrider.cli import main
from outrider.client import Client
from outrider.errors import OutriderError
from outrider.links.cluster_view import ProcessView

pytestmark = [pytest.mark.model]

PROMPTS = ["the rain in spain", "a stitch in time", "once upon a", "no man is an island"]
PAUSE_S = 0.3  # between requests: those who start engines need the cores
PARAMS: dict[str, Any] = {"max_tokens": 100, "temperature": 0.8, "seed": 7, "ignore_eos": True}


class Pair(Protocol):
    """Folders of checkpoints; see `conftest.py`."""

    target: Any
    draft: Any


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[ServeProcess]:
    arguments = ["--no-ray", "--replicas", "2", "--model", str(pair.target)]
    arguments += ["--draft-model", str(pair.draft), "--admin-port", "0"]
    arguments += ["--set", "cluster.colocate=true", "--set", "deterministic=true"]
    arguments += ["--set", "cache.kv_cache_gb=0.01", "--set", "server.drain_s=2"]
    with ServeProcess(*arguments) as process:
        process.wait_ready().close()
        yield process
        process.interrupt()
        assert process.wait() == 0, process.output
        process.wait_nothing_left()
        assert process.left_files() == []


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[Client]:
    with Client(server.grpc_address) as client:
        yield client


@pytest.fixture(scope="module")
def expected(client: Client) -> dict[str, list[int]]:
    return {prompt: _tokens(client, prompt) for prompt in PROMPTS}


def _tokens(client: Client, prompt: str) -> list[int]:
    with client.stream(prompt, timeout_s=60, **PARAMS) as stream:
        return [token for chunk in stream for token in chunk.token_ids]


@contextmanager
def _requests(client: Client, expected: dict[str, list[int]]) -> Iterator[None]:
    """One after the other for every prompt, all the while; none may fail or differ."""
    is_over = threading.Event()
    wrong: list[str] = []
    num_right = [0] * len(PROMPTS)

    def ask(number: int, prompt: str) -> None:
        while not is_over.is_set():
            try:
                tokens = _tokens(client, prompt)
            except OutriderError as error:
                wrong.append(f"{prompt!r}: {error}")
                return
            if tokens != expected[prompt]:
                wrong.append(f"{prompt!r} got another text")
                return
            num_right[number] += 1
            is_over.wait(PAUSE_S)

    threads = [threading.Thread(target=ask, args=each) for each in enumerate(PROMPTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(90)
    assert wrong == []
    assert all(num_right), num_right


def _engines(client: Client) -> dict[str, ProcessView]:
    """By the replicas' short names."""
    cluster = client.status().cluster
    assert cluster is not None
    return {
        each.replica.rpartition("/")[2]: each for each in cluster.processes if each.role == "engine"
    }


def _outrider(server: ServeProcess, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--server", server.grpc_address])
    return int(ended.value.code or 0)


def test_a_lost_engine_holds_up_only_its_own_replica(
    server: ServeProcess, client: Client, expected: dict[str, list[int]]
) -> None:
    before = _engines(client)
    assert sorted(before) == ["0", "1"]
    with _requests(client, expected):
        os.kill(before["1"].pid, signal.SIGKILL)
        server.wait_line(r"replica 1: .*its requests go on elsewhere")
        server.wait_line(r"replica 1: serving again after")
        wait_until(lambda: _engines(client)["1"].state == "ready", 20)
    after = _engines(client)
    assert after["0"].pid == before["0"].pid and after["0"].restarts == 0
    assert after["1"].pid != before["1"].pid and after["1"].restarts == 1


def test_the_status_shows_each_replica_and_whose_each_process_is(
    server: ServeProcess, expected: dict[str, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _outrider(server, "status") == 0
    shown = capsys.readouterr().out
    for name in ("0", "1"):
        assert re.search(rf"^{name} +engine +0 +\d+ +\S+ +- +\d+ +ready", shown, re.M), shown
        assert re.search(rf"^{name} +\d+ +\d+ +\d+ of \d+ .* serving", shown, re.M), shown


def test_replicas_are_taken_away_and_added_under_requests(
    server: ServeProcess,
    client: Client,
    expected: dict[str, list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    retired = _engines(client)["1"].pid
    with _requests(client, expected):
        assert _outrider(server, "scale", "1") == 0
        assert sorted(_engines(client)) == ["0"] and not is_alive(retired)
        assert _outrider(server, "scale", "2", "--timeout", "60") == 0
        assert sorted(_engines(client)) == ["0", "1"]
    said = capsys.readouterr().out
    assert "done: scale to 1 replica\n" in said and "done: scale to 2 replicas\n" in said


def test_another_draft_is_rolled_out_under_requests(
    server: ServeProcess, client: Client, expected: dict[str, list[int]], pair: Pair
) -> None:
    before = {each.pid for each in _engines(client).values()}
    with _requests(client, expected):
        assert _outrider(server, "rollout", "--draft-model", str(pair.target)) == 0
    assert before.isdisjoint(each.pid for each in _engines(client).values())
    assert len(_engines(client)) == 2
    settings = client.status().settings
    assert settings is not None and settings.draft == str(pair.target)


def test_orders_that_cannot_be_carried_out_change_nothing(
    server: ServeProcess, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {each.pid for each in _engines(client).values()}
    assert _outrider(server, "scale", "0") != 0
    assert "it must be from 1 to 256" in capsys.readouterr().err
    assert _outrider(server, "rollout", "--set", "target.model=another") != 0
    assert "start another server" in capsys.readouterr().err
    assert _outrider(server, "rollout", "--draft-model", "/nowhere") != 0
    assert "roll out draft.model=/nowhere" in capsys.readouterr().err
    assert {each.pid for each in _engines(client).values()} == before
