"""`outrider serve --no-ray`: the same server on one host; the engine is a child process, and so are
the ranks of the engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster_tools import ServeProcess, wait_until
from process_tools import is_alive

from outrider import SamplingParams
from outrider.client import Client

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

MODEL = "smollm2-135m-draft"
NUM_TOKENS = 150


def _tokens(client: Client, kill: int | None = None) -> list[int]:
    """The tokens of one request, at the beginning of which a process is killed."""
    tokens: list[int] = []
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for chunk in client.stream("Once upon a time", params, timeout_s=60):
        tokens += chunk.token_ids
        if kill is not None:
            os.kill(kill, signal.SIGKILL)
            kill = None
    return tokens


def _pids(client: Client) -> dict[str, int]:
    engine = client.status().engine
    assert engine is not None
    return {rank.role: rank.pid for rank in engine.ranks}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_it_serves_survives_target_and_engine_and_leaves_no_process() -> None:
    arguments = ["--model", MODEL, "--draft-model", MODEL, "--set", "deterministic=true"]
    arguments += ["--set", "cluster.colocate=false"]
    with ServeProcess("--no-ray", *arguments) as server, server.wait_ready() as client:
        assert "Ray" not in server.output
        undisturbed = _tokens(client)
        assert _tokens(client, kill=_pids(client)["target"]) == undisturbed

        ranks = list(_pids(client).values())
        [engine] = {_parent(pid) for pid in ranks}
        assert _parent(engine) == server.pid
        assert len({*ranks, engine, server.pid}) == 4
        assert _tokens(client, kill=engine) == undisturbed
        wait_until(lambda: not any(map(is_alive, ranks)), 10)

        server.interrupt()
        assert server.wait() == 0, server.output
        server.wait_nothing_left()
        assert server.left_files() == []
