"""Engine, ranks and gateway each started by a command of its own, over TCP, without Ray."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.client import Client

pytestmark = [pytest.mark.model, pytest.mark.alone]

MODEL = "smollm2-135m-draft"
LIMIT_S = 300.0
FREE_PORTS = ("--set", "server.port=0", "--set", "server.grpc_port=0")


class Commands:
    """Processes that write to a log each and end with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._secret = secrets.token_hex(16)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        with (self._folder / name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=os.environ | {"OUTRIDER_SECRET": self._secret, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def find(self, name: str, pattern: str) -> str:
        """What the pattern's group matches in the log, waited for."""
        found = None
        self.wait(lambda: bool(re.search(pattern, self.log(name))), f"{pattern!r} of {name}")
        found = re.search(pattern, self.log(name))
        assert found is not None
        return found[1]

    def log(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            logs = "\n".join(self.log(name) for name in self._processes)
            assert time.monotonic() < deadline_s, f"no {what}:\n{logs}"
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def terminate(self, name: str) -> int:
        self._processes[name].terminate()
        return self._processes[name].wait(LIMIT_S)


@contextmanager
def commands(folder: Path) -> Iterator[Commands]:
    started = Commands(folder)
    try:
        yield started
    finally:
        for name in started._processes:
            started.kill(name)


def test_processes_started_by_hand_find_each_other_and_a_draft_may_come_back(
    tmp_path: Path,
) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    with commands(tmp_path) as run:
        run.start(
            *("engine", "outrider.engine", "--listen", "tcp:127.0.0.1:0"),
            *("--set", f"target.model={MODEL}", "--set", f"draft.model={MODEL}"),
            *("--set", "speculation.policy=fixed"),
            *("--set", "deterministic=true", "--set", "cache.kv_cache_gb=0.05"),
        )
        address = run.find("engine", r"listening on (tcp:\S+) for")
        for role in ("target", "draft"):
            run.start(role, "outrider.workers", *_rank(address, role))
        run.start("gateway", "outrider.gateway", "--engine", address, *FREE_PORTS)
        with Client(run.find("gateway", r"and (\S+)")) as client:
            client.wait_ready(LIMIT_S)
            first = client.generate("The sky is", params)
            assert first.speculation.drafted_tokens > 0

            run.kill("draft")
            assert client.generate("The sky is", params).text == first.text
            run.start("draft", "outrider.workers", *_rank(address, "draft"))
            run.wait(lambda: _has_draft(client), "draft again")
            again = client.generate("The sky is", params)
            assert again.text == first.text
            assert again.speculation.drafted_tokens > 0

        assert run.terminate("engine") == 0
        run.wait(lambda: run.ended("target") and run.ended("draft"), "end of the ranks")
    with LLM(MODEL, deterministic=True, kv_cache_gb=0.05, log_level="error") as llm:
        assert llm.generate(["The sky is"], params)[0].outputs[0].text == first.text


def test_an_engine_started_by_hand_may_hold_the_models_itself(tmp_path: Path) -> None:
    with commands(tmp_path) as run:
        run.start(
            *("engine", "outrider.engine", "--listen", "tcp:127.0.0.1:0"),
            *("--set", f"target.model={MODEL}", "--set", f"draft.model={MODEL}"),
            *("--set", "speculation.policy=fixed"),
            *("--set", "cluster.colocate=true", "--set", "cache.kv_cache_gb=0.05"),
        )
        address = run.find("engine", r"listening on (tcp:\S+) for gateways")
        run.start("gateway", "outrider.gateway", "--engine", address, *FREE_PORTS)
        with Client(run.find("gateway", r"and (\S+)")) as client:
            client.wait_ready(LIMIT_S)
            answer = client.generate("The sky is", max_tokens=8, ignore_eos=True)
            assert answer.usage.completion_tokens == 8
            assert answer.speculation.drafted_tokens > 0
            engine = client.status().engine
            assert engine is not None and engine.ranks == ()
        assert run.terminate("engine") == 0


def _rank(address: str, role: str) -> list[str]:
    return ["--engine", address, "--role", role, "--rank", "0", "--size", "1"]


def _has_draft(client: Client) -> bool:
    engine = client.status().engine
    return engine is not None and engine.proposal_backend == "tcp"
