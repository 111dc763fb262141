"""Chaos against a real server: draft and target are killed under load, and no token is wrong."""

from __future__ import annotations

import asyncio
import itertools
import shlex
import sys
import time
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from outrider.loadtest.records import RequestOutcome, RequestRecord, ShiftPhase
from outrider.loadtest.results.chaos_verdict import chaos_verdict
from outrider.loadtest.servers.chaos import Chaos, ChaosEvent, read_events
from outrider.loadtest.servers.chaos_file import read_chaos
from outrider.loadtest.servers.server import ServerSpec, ServerUnderTest
from outrider.loadtest.servers.watch import ServerWatch
from outrider.scheduler.params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-draft"
SERVE = [sys.executable, "-m", "outrider", "serve", "--no-ray", "--port", "0"]
SERVE += ["--grpc-port", "{port}"]
SERVE += ["--model", MODEL, "--draft-model", MODEL, "--set", "deterministic=true"]
SERVE += ["--set", "cluster.colocate=false"]
EVENTS = """
- {at: 1s, do: kill, what: draft}
- {at: 6s, do: kill, what: target}
- {at: 12s, do: stop, for: 1s, what: {role: draft, rank: 0}}
"""
CLIENTS = 2
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
ASKS = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "In the beginning"]


async def _ask(client: AsyncClient, name: str, prompt: str) -> RequestRecord:
    sent_s = time.monotonic()
    record = RequestRecord(
        name, "chaos", "clients 2", 0, ShiftPhase.MEASURED, "x", sent_s, sent_s, token_ids=[]
    )
    assert record.token_ids is not None
    try:
        async for chunk in client.stream(prompt, PARAMS, timeout_s=90.0):
            record.update_s.append(time.monotonic() - sent_s)
            record.token_ids += chunk.token_ids
        record.outcome = RequestOutcome.OK
    except Exception as error:
        record.error = str(error)
    record.end_s = time.monotonic()
    return record


async def _load(client: AsyncClient, chaos: asyncio.Task[list[ChaosEvent]]) -> list[RequestRecord]:
    """Closed loop until chaos is over, and one question more."""

    async def ask_on(first: int) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        for turn in itertools.count(first):
            is_last = chaos.done()
            prompt = ASKS[turn % len(ASKS)]
            records.append(await _ask(client, prompt, prompt))
            if is_last:
                break
        return records

    found = await asyncio.gather(*(ask_on(number) for number in range(CLIENTS)))
    return [record for records in found for record in records]


def test_killed_draft_and_target_cost_time_but_no_request_and_no_token(tmp_path: Path) -> None:
    (tmp_path / "chaos.yaml").write_text(EVENTS)
    planned = read_chaos(tmp_path / "chaos.yaml")
    env = {"OMP_NUM_THREADS": "1"}
    spec = ServerSpec("ours", "grpc://127.0.0.1:{port}", shlex.join(SERVE), env, None, 120)

    async def live() -> tuple[list[RequestRecord], list[RequestRecord]]:
        server = ServerUnderTest(spec, tmp_path)
        await server.start()
        try:
            async with AsyncClient(server.url.removeprefix("grpc://")) as client:
                references = [await _ask(client, prompt, prompt) for prompt in ASKS]
                chaos = Chaos(planned, server, tmp_path / "chaos.jsonl")
                doing = asyncio.create_task(chaos.run())
                records = await _load(client, doing)
                await doing
            watch = ServerWatch(server)
            sample = await watch.sample()
            await watch.close()
            assert sample.processes >= 4 and sample.committed is not None
        finally:
            await server.stop()
        return references, records

    references, records = asyncio.run(live())
    events = read_events(tmp_path / "chaos.jsonl")
    assert [event.error for event in events] == [None] * len(events)
    done = sorted(event.did for event in events)
    assert done == ["back", "back", "continue", "kill", "kill", "stop"]

    verdict = chaos_verdict(events, records, references)
    assert verdict.is_sound, (verdict.sentences, [record.error for record in records])
    assert verdict.compared == len(records) >= CLIENTS
    draft, target, _ = verdict.recoveries
    assert draft.back_s is not None and target.back_s is not None
    assert target.recovery_s is not None and target.recovery_s > 0
