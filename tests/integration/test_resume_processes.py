"""A gateway process that is killed under load while another takes over, before a real model."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client, Completion

pytestmark = [pytest.mark.model, pytest.mark.alone, pytest.mark.timeout(240)]

MODEL = "smollm2-135m-draft"
LIMIT_S = 90.0
COMMON: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "The sky is", "seed": 1, "resumable": True},
    {"prompt": "Once upon a time", "seed": 2, "n": 3, "resumable": True},
    {"prompt": "One, two, three,", "seed": 3, "logprobs": 3, "resumable": True},
    {"prompt": "The river", "seed": 4, "n": 2, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"prompt": "A list of", "seed": 5, "repetition_penalty": 1.3, "logprobs": 1},
    {"prompt": "In the year", "seed": 6, "prompt_logprobs": 2, "resumable": True},
    {"prompt": "My name is", "seed": 7, "n": 2, "logprobs": 0, "resumable": True, "top_k": 20},
    {"prompt": "Because of", "seed": 8, "min_p": 0.05, "stop": ["zebra"], "echo": True},
]


@contextmanager
def process(log: Path, secret: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as written:
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=os.environ | {"OUTRIDER_SECRET": secret, "OMP_NUM_THREADS": "1"},
            stdout=written,
            stderr=written,
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def found(log: Path, pattern: str) -> str:
    deadline_s = time.monotonic() + LIMIT_S
    while not (match := re.search(pattern, log.read_text(errors="replace"))):
        assert time.monotonic() < deadline_s, log.read_text(errors="replace")
        time.sleep(0.05)
    return match[1]


def essence(done: Completion) -> Any:
    samples = [
        (each.text, each.token_ids, each.logprobs, each.cumulative_logprob, each.finish_reason)
        for each in done.samples
    ]
    return samples, done.prompt_logprobs, done.seed, done.usage.completion_tokens


def test_no_stream_notices_that_a_gateway_was_killed_but_for_a_pause(tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    with ExitStack() as stack:
        start = stack.enter_context
        engine_log = tmp_path / "engine"
        start(
            process(
                *(engine_log, secret, "outrider.engine", "--listen", f"unix:{tmp_path}/socket"),
                *("--set", f"target.model={MODEL}", "--set", "speculation.method=ngram"),
                *("--set", "deterministic=true", "--set", "cache.kv_cache_gb=0.1"),
                *("--set", "cluster.colocate=true"),
            )
        )
        found(engine_log, "(ready) for gateways")
        gateways, ports = [], []
        for name in ("one", "two"):
            log = tmp_path / name
            arguments = ["outrider.gateway", "--engine", f"unix:{tmp_path}/socket"]
            arguments += ["--set", "server.port=0", "--set", "server.grpc_port=0"]
            gateways.append(start(process(log, secret, *arguments)))
            ports.append(found(log, r"and 127\.0\.0\.1:(\d+)"))
        with Client(f"127.0.0.1:{ports[1]}") as other:
            other.wait_ready(LIMIT_S)
            expected = [other.generate(**each, **COMMON) for each in REQUESTS]
        both = ",".join(f"127.0.0.1:{port}" for port in ports)
        with Client(f"ipv4:{both}") as client:  # the first of them as long as it answers
            client.wait_ready(LIMIT_S)
            done = _read_all(client, lambda: os.kill(gateways[0].pid, signal.SIGKILL))
        gateways[0].wait(LIMIT_S)
        taken_over = (tmp_path / "two").read_text(errors="replace")
    for each, undisturbed in zip(done, expected, strict=True):
        assert essence(each) == essence(undisturbed)
        assert each.resumptions == 1
    assert "attached to what the engine has gone on with" in taken_over


def _read_all(client: Client, kill: Any) -> list[Completion]:
    """All requests at once; the first gateway is killed when each has some tokens and none all."""
    streams = [client.stream(**each, **COMMON) for each in REQUESTS]
    for stream in streams:
        next(itertools.islice(stream, 2, None))
    kill()
    threads = [threading.Thread(target=stream.result, daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return [stream.completion for stream in streams]
