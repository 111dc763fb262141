"""Latencies on one GPU: time to first token, the longest gap of a stream, and the cost of a loaded
draft that is switched off."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from typing import Any

from outrider.benchmarks.control.engine import ClosedLoop, MakeRequest, drain, switch
from outrider.benchmarks.control.simulation import AUTO, DEEPEST, PLAIN, PolicyArm
from outrider.benchmarks.gpu_engine import BenchEngine, EnlargedModels
from outrider.engine.step import StepLoop
from outrider.scheduler.policies import FIXED
from outrider.scheduler.request import Request
from outrider.scheduler.types import IN_PROCESS, NO_PROPOSER, SampleId

_STREAMS = 64
_LONG_PROMPT = 2000
_REPEATS = 12


def measure_users(
    models: EnlargedModels, draft_shape: str, make: MakeRequest, found: dict[str, Any]
) -> None:
    """Run all parts; results go into `found`."""
    engine = BenchEngine(models, draft_shape, DEEPEST, _STREAMS + 1, max_len=4096)
    found["first_token_alone_ms"] = _first_tokens_alone(engine.loop, make)
    found["long_prompt_among_64"] = {
        arm.name: _long_prompt(engine.loop, make, arm, number)
        for number, arm in enumerate((PLAIN, AUTO))
    }
    found["off_is_free"] = _off_is_free(engine, models, make)
    engine.close()


def _first_tokens_alone(loop: StepLoop, make: MakeRequest) -> dict[str, float]:
    """Median time to first token of single requests in an idle engine."""
    found: dict[str, list[float]] = {"off": [], "drafted": []}
    for number in range(4 * _REPEATS):
        name = ("off", "drafted")[number % 2]
        switch(loop, PLAIN if name == "off" else PolicyArm(FIXED, DEEPEST))
        request = make(5 * 10**6 + number)
        start_s = time.perf_counter()
        loop.scheduler.add(request)
        while not any(update.token_ids for update in loop.step(time.monotonic())):
            pass
        if number >= 4:
            found[name].append(1e3 * (time.perf_counter() - start_s))
        loop.scheduler.cancel(request.sample_id)
        drain(loop)
    return {name: statistics.median(each) for name, each in found.items()}


def _long_prompt(
    loop: StepLoop, make: MakeRequest, arm: PolicyArm, number: int
) -> dict[str, float]:
    """Prompts of 2,000 tokens arrive among streams: their time to first token, and the longest gap
    in any stream meanwhile."""
    switch(loop, arm)
    closed = ClosedLoop(loop, _STREAMS, make, first=(6 + number) * 10**6)
    closed.run(1.5)
    firsts, pauses = [], []
    rng = random.Random(number)
    for repeat in range(_REPEATS):
        handle = 10**9 + 10**7 * number + repeat
        guest = _guest(make, handle, rng)
        closed.guest = guest.sample_id
        loop.scheduler.add(guest)
        first_ms, pause_ms = _until_first_token(loop, guest.sample_id)
        firsts.append(first_ms)
        pauses.append(pause_ms)
        loop.scheduler.cancel(guest.sample_id)
        closed.run(0.2)
    closed.end()
    return {
        "first_token_p50_ms": statistics.median(firsts),
        "first_token_p95_ms": sorted(firsts)[int(0.95 * len(firsts))],
        "longest_pause_ms": max(pauses),
    }


def _guest(make: MakeRequest, handle: int, rng: random.Random) -> Request:
    usual = make(handle)
    prompt = tuple(rng.randrange(1000, 40000) for _ in range(_LONG_PROMPT))
    spec = replace(usual.spec, prompt_ids=prompt, max_len=_LONG_PROMPT + 64)
    return Request(SampleId(IN_PROCESS, handle), spec, seed=usual.seed, arrival_s=time.monotonic())


def _until_first_token(loop: StepLoop, guest: SampleId) -> tuple[float, float]:
    start_s = time.perf_counter()
    last_s: dict[SampleId, float] = {}
    longest_s = 0.0
    while True:
        updates = loop.step(time.monotonic())
        now_s = time.perf_counter()
        for update in updates:
            if update.token_ids:
                longest_s = max(longest_s, now_s - last_s.get(update.sample_id, start_s))
                last_s[update.sample_id] = now_s
        if guest in last_s:
            return 1e3 * (now_s - start_s), 1e3 * longest_s


def _off_is_free(
    engine: BenchEngine, models: EnlargedModels, make: MakeRequest
) -> dict[str, float]:
    """A loaded draft that is switched off against no draft, interleaved."""
    alone = BenchEngine(models, None, 0, _STREAMS, max_len=4096)
    switch(engine.loop, PLAIN)

    def make_undrafted(number: int) -> Request:
        usual = make(number)
        spec = replace(usual.spec, proposer=NO_PROPOSER, depth=0)
        return Request(usual.sample_id, spec, seed=usual.seed, arrival_s=usual.arrival_s)

    closed = {
        "off": ClosedLoop(engine.loop, _STREAMS, make, first=8 * 10**6),
        "without": ClosedLoop(alone.loop, _STREAMS, make_undrafted, first=9 * 10**6),
    }
    rates: dict[str, list[float]] = {name: [] for name in closed}
    for each in closed.values():
        each.run(1.0)
    for _ in range(6):
        for name, each in closed.items():
            tokens, _, spent_s = each.run(0.7)
            rates[name].append(tokens / spent_s)
    for each in closed.values():
        each.end()
    alone.close()
    means = {name: statistics.fmean(each) for name, each in rates.items()}
    return {**means, "share": means["off"] / means["without"]}
