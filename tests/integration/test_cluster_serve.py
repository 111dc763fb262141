"""`outrider serve` over Ray: one server that is used and at last stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_tools import ServeProcess, streamed_tokens

from outrider.client import Client

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m-draft"
PROMPT = "Once upon a time there was a"
NUM_TOKENS = 200
PARAMS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    arguments = ["--model", MODEL, "--draft-model", MODEL, "--set", "deterministic=true"]
    arguments += ["--set", "server.drain_s=60"]
    with ServeProcess(*arguments) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[Client]:
    with server.wait_ready() as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(client: Client) -> list[int]:
    return streamed_tokens(client, PROMPT, **PARAMS)


def _pids(client: Client, role: str) -> list[int]:
    """Of ranks that are ready."""
    engine = client.status().engine
    ranks = () if engine is None else engine.ranks
    return [rank.pid for rank in ranks if rank.role == role and rank.state == "ready"]


def test_every_stage_of_the_start_is_told_with_its_time(
    server: ServeProcess, client: Client
) -> None:
    stages = [
        r"[\d.]+ s  models and tokenizers checked",
        r"[\d.]+ s  Ray started on this machine",
        r"[\d.]+ s  placed: target on 1 CPU, draft on 1 CPU",
        r"[\d.]+ s  target: 1 of 1 ranks up",
        r"[\d.]+ s  (target|draft) rank 0: weights loaded in",
        r"[\d.]+ s  draft joined, proposals over tcp",
        r"[\d.]+ s  KV: \d+ blocks",
        r"[\d.]+ s  listening on http://127.0.0.1:\d+ and, for gRPC, on 127.0.0.1:\d+",
        r"ready in [\d.]+ s",
        r"speculation: [a-z() ]+, (up to )?\d drafts a request \(the default of this device",
        r"Open http://localhost:\d+/ in a browser",
        r"curl http://localhost:\d+/v1/completions .*",
        r"outrider chat --server localhost:\d+",
    ]
    assert re.search(".*".join(stages), server.output, re.DOTALL), server.output


def test_a_client_gets_text(client: Client) -> None:
    completion = client.generate("The capital of France is", max_tokens=4, temperature=0)
    assert completion.usage.completion_tokens == 4
    assert completion.text


def test_target_and_draft_are_processes_of_their_own(client: Client) -> None:
    target, draft = _pids(client, "target"), _pids(client, "draft")
    assert len(target) == len(draft) == 1
    assert target != draft


def test_status_shows_what_the_controller_has_started(client: Client) -> None:
    cluster = client.status().cluster
    assert cluster is not None
    assert (cluster.controller, cluster.state) == ("Ray actor outrider-controller", "serving")
    shown = [(each.role, each.rank, each.state) for each in cluster.processes]
    assert shown == [
        ("gateway", 0, "ready"),
        ("engine", 0, "ready"),
        ("target", 0, "ready"),
        ("draft", 0, "ready"),
    ]
    assert len({each.pid for each in cluster.processes}) == 4
    assert [each.pid for each in cluster.processes][2:] == [
        *_pids(client, "target"),
        *_pids(client, "draft"),
    ]


def test_a_signal_to_all_its_processes_lets_a_running_request_finish_and_leaves_nothing(
    server: ServeProcess, client: Client, undisturbed: list[int]
) -> None:
    tokens: list[int] = []
    with client.stream(PROMPT, timeout_s=90, **PARAMS) as stream:
        for chunk in stream:
            if not tokens:
                server.terminate_all()
            tokens += chunk.token_ids
    assert tokens == undisturbed
    assert server.wait() == 0, server.output
    server.wait_nothing_left()
    assert "stopping: 1 running request gets 60 s" in server.output
    assert server.left_files() == []
