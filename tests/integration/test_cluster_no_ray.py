"""`outrider serve --no-ray`: the same server on one host, its ranks as child processes."""

from __future__ import annotations

import os
import signal

import pytest
from cluster_tools import ServeProcess

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


def test_it_serves_survives_its_target_and_leaves_no_process() -> None:
    arguments = ["--model", MODEL, "--draft-model", MODEL, "--set", "deterministic=true"]
    with ServeProcess("--no-ray", *arguments) as server, server.wait_ready() as client:
        assert "Ray" not in server.output
        engine = client.status().engine
        assert engine is not None
        pids = {rank.role: rank.pid for rank in engine.ranks}
        assert len({pids["target"], pids["draft"], server.pid}) == 3

        undisturbed = _tokens(client)
        assert _tokens(client, kill=pids["target"]) == undisturbed

        server.interrupt()
        assert server.wait() == 0, server.output
        server.wait_nothing_left()
