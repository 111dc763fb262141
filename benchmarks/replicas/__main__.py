"""`python -m outrider.benchmarks.replicas`: tokens per second and prefix hit rates of one and
several replicas, in multi-turn conversations with a shared system prompt.

Engines are processes with the real scheduler and caches whose steps only sleep, so that they do not
compete for the processor. The KV blocks are divided among the replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import uvloop

from outrider.client import AsyncClient
from outrider.config import ServerConfig
from outrider.gateway.frontend import Frontend
from outrider.gateway.gateway import GatewayState
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState
from outrider.links.gateway_messages import EngineStatus
from outrider.links.secret import SECRET_VARIABLE
from outrider.logs import setup_logging

START_S = 60.0
SYSTEM_TOKENS, MESSAGE_TOKENS, TURNS = 400, (16, 96), 8
_WORDS = range(1000, 20_000)


@dataclass(frozen=True, slots=True)
class ReplicaRunResult:
    """One run. `prefix_hit_rate` is a share of prompt tokens. `largest_load` is the samples on the
    busiest replica over the mean of all replicas, averaged over the run."""

    replicas: int
    users: int
    tokens_per_s: float
    requests: int
    prefix_hit_rate: float
    largest_load: float


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.benchmarks.replicas", description=__doc__
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1, help="of all of these, interleaved")
    parser.add_argument("--users", type=int, default=64, help="concurrent conversations")
    parser.add_argument("--seats", type=int, default=8, help="concurrent samples of a replica")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--blocks", type=int, default=8192, help="of KV, of all replicas")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="after a third of it as warm-up"
    )
    given = parser.parse_args()
    setup_logging("error", role="bench")
    results: dict[int, list[ReplicaRunResult]] = {}
    for count in given.replicas * given.rounds:
        result = _measured(given, count)
        results.setdefault(count, []).append(result)
        print(json.dumps(asdict(result)), flush=True)
    first, last = given.replicas[0], given.replicas[-1]
    tokens, hits = (
        statistics.median(getattr(each, name) for each in results[last])
        / statistics.median(getattr(each, name) for each in results[first])
        for name in ("tokens_per_s", "prefix_hit_rate")
    )
    print(f"{last} replicas: {tokens:.2f} times the tokens of {first}, {hits:.1%} of its hit rate")


def _measured(given: argparse.Namespace, count: int) -> ReplicaRunResult:
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="outrider-replicas-") as folder, ExitStack() as stack:
        addresses = [f"unix:{folder}/{number}.sock" for number in range(count)]
        for address in addresses:
            stack.enter_context(_engine(given, address, secret, given.blocks // count))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_served(given, addresses, secret))


@contextmanager
def _engine(given: argparse.Namespace, address: str, secret: str, blocks: int) -> Iterator[None]:
    command = ["outrider.benchmarks.replicas.engine", "--listen", address, "--blocks", str(blocks)]
    command += ["--step-ms", str(given.step_ms), "--seats", str(given.seats)]
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | {SECRET_VARIABLE: secret},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("an engine did not start")
        yield
    finally:
        process.kill()
        process.wait(10)


async def _served(given: argparse.Namespace, addresses: list[str], secret: str) -> ReplicaRunResult:
    front = Frontend(secret, ServerConfig(port=0, grpc_port=0))
    await front.start()
    try:
        places = [
            ReplicaPlace(str(number), (address,), ReplicaState.SERVING)
            for number, address in enumerate(addresses)
        ]
        await front.gateway.replicas.publish("", places)
        async with asyncio.timeout(START_S):
            while len(front.gateway.replicas.connected) < len(places):
                await asyncio.sleep(0.05)
            while front.gateway.state is not GatewayState.SERVING:
                await asyncio.sleep(0.05)
        async with AsyncClient(front.grpc_address) as client:
            return await _ReplicaRun(given, front, client).result(len(addresses))
    finally:
        await front.stop(drain_s=0.0)


class _ReplicaRun:
    def __init__(self, given: argparse.Namespace, front: Frontend, client: AsyncClient) -> None:
        self._given = given
        self._front = front
        self._client = client
        self._rng = random.Random(1)
        self._system = self._words(SYSTEM_TOKENS, SYSTEM_TOKENS)
        self._num_requests = 0
        self._num_measured = 0  # readings of the loads
        self._sum_loads = 0.0  # of the largest over the mean

    async def result(self, count: int) -> ReplicaRunResult:
        users = [asyncio.create_task(self._talk()) for _ in range(self._given.users)]
        await asyncio.sleep(self._given.seconds / 3)
        before, began_s, num_before = await self._counts(), time.monotonic(), self._num_requests
        while time.monotonic() < began_s + self._given.seconds:
            await asyncio.sleep(0.1)
            loads = [each.link.load for each in self._front.gateway.replicas]
            self._sum_loads += max(loads) * len(loads) / max(sum(loads), 1)
            self._num_measured += 1
        after, took_s = await self._counts(), time.monotonic() - began_s
        failed = [task for task in users if task.done()]
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
        if failed:
            failed[0].result()
        tokens, prompt_tokens, hits = (now - then for now, then in zip(after, before, strict=True))
        return ReplicaRunResult(
            replicas=count,
            users=self._given.users,
            tokens_per_s=round(tokens / took_s, 1),
            requests=self._num_requests - num_before,
            prefix_hit_rate=round(hits / max(prompt_tokens, 1), 4),
            largest_load=round(self._sum_loads / self._num_measured, 3),
        )

    async def _counts(self) -> tuple[int, int, int]:
        """Committed tokens, prompt tokens, and cached prompt tokens."""
        found: list[EngineStatus] = []
        async with asyncio.timeout(START_S):
            while len(found) < len(list(self._front.gateway.replicas)):
                statuses = await self._front.gateway.replicas.statuses()
                found = [each for each in statuses.values() if each is not None]
        return (
            sum(each.committed_tokens for each in found),
            sum(each.counters.prompt_tokens for each in found),
            sum(each.counters.cached_tokens for each in found),
        )

    async def _talk(self) -> None:
        """One conversation after the other."""
        while True:
            text = [*self._system]
            for _ in range(self._rng.randint(1, 2 * TURNS)):
                text += self._words(*MESSAGE_TOKENS)
                done = await self._client.generate(
                    text, max_tokens=self._given.tokens, ignore_eos=True
                )
                text += done.samples[0].token_ids
                self._num_requests += 1

    def _words(self, minimum: int, maximum: int) -> list[int]:
        return self._rng.choices(_WORDS, k=self._rng.randint(minimum, maximum))


if __name__ == "__main__":
    main()
