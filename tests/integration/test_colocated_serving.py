"""`outrider serve` with both models in the engine's process: the same text, without ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import ServeProcess, streamed_tokens
from process_tools import is_alive
from waits import wait_until

from outrider import LLM, SamplingParams
from outrider.checkpoints.resolve import resolve_source
from outrider.cli import main
from outrider.client import Client
from outrider.config import EngineConfig
from outrider.engine.launch import child as child_module
from outrider.engine.launch.child import EngineChild, EngineChildError

pytestmark = [pytest.mark.model]

MODEL = "smollm2-135m-draft"
PROMPT = "Once upon a time there was a"
NUM_TOKENS = 120
PARAMS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}
PAIR = ["--model", MODEL, "--draft-model", MODEL]
COLOCATED = [*PAIR, "--set", "deterministic=true", "--set", "cluster.colocate=true"]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What target and draft write as processes of their own."""
    options = {"draft_model": MODEL, "workers": "processes", "deterministic": True}
    with LLM(MODEL, kv_cache_gb=0.1, log_level="error", **options) as llm:
        [result] = llm.generate([PROMPT], SamplingParams(**PARAMS))
    return list(result.outputs[0].token_ids)


def _engine_pid(client: Client) -> int:
    """The status says that the engine's process, and no rank, has the models."""
    engine = client.status().engine
    assert engine is not None
    assert engine.ranks == ()
    assert [(model.role, model.device) for model in engine.models] == [
        ("target", "cpu"),
        ("draft", "cpu"),
    ]
    [pid] = {model.pid for model in engine.models}
    return pid


def _gateway_pid(client: Client) -> int:
    cluster = client.status().cluster
    assert cluster is not None
    [pid] = [each.pid for each in cluster.processes if each.role == "gateway"]
    return pid


def _commands(server: ServeProcess) -> list[str]:
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in server.left_pids()]
    return [line.replace("\0", " ") for line in lines]


def test_one_engine_process_serves_is_replaced_when_lost_and_leaves_nothing(
    expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with ServeProcess("--no-ray", *COLOCATED) as server, server.wait_ready() as client:
        pid = _engine_pid(client)
        assert sorted(server.left_pids()) == sorted([server.pid, pid, _gateway_pid(client)])
        assert not any("outrider.workers" in command for command in _commands(server))
        server.wait_line(rf"target and draft: loading on cpu in the engine's process \(pid {pid}\)")
        with pytest.raises(SystemExit):
            main(["status", "--server", server.grpc_address])
        shown = capsys.readouterr().out
        assert re.search(rf"draft +{pid} +\S+ +cpu +the engine's", shown), shown
        assert streamed_tokens(client, PROMPT, **PARAMS) == expected

        assert streamed_tokens(client, PROMPT, kill=pid, **PARAMS) == expected
        server.wait_line(r"process ended with exit code -9; .*restarting engine and models in 0 s")
        again = _engine_pid(client)
        assert again != pid
        server.wait_line(rf"serving again after [\d.]+ s \(engine pid {again}\)")

        with client.stream(PROMPT, max_tokens=4000, ignore_eos=True, timeout_s=60) as stream:
            next(iter(stream))
        wait_until(lambda: _running(client) == 0, 10)

        server.interrupt()
        assert server.wait() == 0, server.output
        server.wait_nothing_left()


def _running(client: Client) -> int | None:
    engine = client.status().engine
    return None if engine is None else engine.running


STARTER = """
import sys
from outrider.config import EngineConfig
from outrider.engine.launch.child import EngineChild
EngineChild(EngineConfig.from_kwargs(model=sys.argv[1], colocate=True)).start(print)
"""


def test_an_engine_ends_with_the_process_that_started_it() -> None:
    command = [sys.executable, "-u", "-c", STARTER, MODEL]
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # which the killed one leaves behind
        env = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as starter:
            assert starter.stdout is not None
            found = (re.search(r"engine's process \(pid (\d+)\)", line) for line in starter.stdout)
            told = next(filter(None, found), None)
            starter.kill()
        assert told is not None
        wait_until(lambda: not is_alive(int(told[1])), 10)


@pytest.mark.parametrize(("colocate", "who"), [(True, ""), (False, "target rank 0.*")])
def test_an_engine_that_fails_to_start_says_why(tmp_path: Path, colocate: bool, who: str) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(resolve_source(MODEL), damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    child = EngineChild(EngineConfig.from_kwargs(model=str(damaged), colocate=colocate))
    try:
        told = f"(?s)^the engine failed: {who}.* is damaged or incomplete"
        with pytest.raises(EngineChildError, match=told):
            child.start(print)
    finally:
        child.close()


def test_an_engine_that_hangs_is_killed_and_one_that_idles_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence_s = 2 * child_module._BEAT_S
    monkeypatch.setattr(child_module, "_SILENCE_S", silence_s)
    child = EngineChild(EngineConfig.from_kwargs(model=MODEL, colocate=True, kv_cache_gb=0.1))
    stopping = threading.Timer(1.5 * silence_s, lambda: os.kill(child.pid, signal.SIGSTOP))
    try:
        child.start(print)
        stopping.start()
        with pytest.raises(EngineChildError, match="the engine failed: it was silent for 4 s"):
            child.run(print)
        assert stopping.finished.is_set()
        assert not is_alive(child.pid)
    finally:
        stopping.cancel()
        child.close()


def test_what_one_process_cannot_hold_is_refused_in_one_sentence() -> None:
    with ServeProcess("--no-ray", *COLOCATED, "--tensor-parallel-size", "2") as server:
        assert server.wait() == 2
        [line] = server.lines
        assert line.endswith(
            "target.tensor_parallel is 2 but cluster.colocate is true, which takes 1; set it to "
            "that, or cluster.colocate to false.\n"
        )


@pytest.mark.ray
@pytest.mark.slow
def test_ray_places_one_actor_with_the_models_and_replaces_it_until_the_terminal_closes(
    expected: list[int],
) -> None:
    with ServeProcess(*COLOCATED) as server, server.wait_ready() as client:
        server.wait_line("placed: engine with its models on 2 CPUs")
        pid = _engine_pid(client)
        cluster = client.status().cluster
        assert cluster is not None
        assert [(each.role, each.pid, each.state) for each in cluster.processes] == [
            ("gateway", _gateway_pid(client), "ready"),
            ("engine", pid, "ready"),
        ]
        assert streamed_tokens(client, PROMPT, kill=pid, **PARAMS) == expected
        server.wait_line("engine was lost: .*; restarting engine and models in 0 s")
        server.wait_line(r"serving again after [\d.]+ s \(engine pid \d+\)")
        assert _engine_pid(client) != pid
        server.stop_reading()
        server.hang_up()  # the end of its terminal, of which Ray must not learn
        assert server.wait() == 0, server.output
        server.wait_nothing_left()
