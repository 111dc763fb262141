"""A search for the fastest settings of llama.cpp on this machine.

Starting from the defaults one setting after another is varied; attention and the KV cache type
depend on each other and are varied together. A challenger is interleaved with the best so far, and
replaces it only if it is faster by more than noise. Finally the best runs against the defaults once
more, which stay unless it wins again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from outrider.benchmarks.peers.llama_servers import LlamaServer, LlamaSettings
from outrider.benchmarks.peers.protocol import Tokens

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
PROMPT: Tokens = [100 + i * 7 % 400 for i in range(PROMPT_TOKENS)]  # ids of any vocabulary
TURNS = 3
LEAST_GAIN = 0.02
Start = Callable[[LlamaSettings], LlamaServer]
Generate = Callable[[LlamaServer, list[Tokens], int], object]


@dataclass(frozen=True, slots=True)
class SettingsSearchResult:
    """`gain` is the speed-up over the defaults."""

    settings: LlamaSettings
    tried: int
    gain: float

    def describe(self) -> str:
        return f"fastest of {self.tried} tried, {self.gain:.2f} times as fast as its defaults"


def find_fastest(
    defaults: LlamaSettings,
    start: Start,
    generate: Generate,
    clock: Callable[[], float] = time.perf_counter,
) -> SettingsSearchResult:
    best, tried = defaults, 1
    for choices in _choices(defaults):
        for choice in choices:
            challenger = replace(best, **choice)
            if challenger == best:
                continue
            tried += 1
            if _times_as_fast(challenger, best, start, generate, clock) > 1 + LEAST_GAIN:
                best = challenger
    if best == defaults:
        return SettingsSearchResult(defaults, tried, 1.0)
    gain = _times_as_fast(best, defaults, start, generate, clock)
    return (
        SettingsSearchResult(best, tried, gain)
        if gain > 1 + LEAST_GAIN
        else SettingsSearchResult(defaults, tried, 1.0)
    )


def _choices(defaults: LlamaSettings) -> Iterator[list[dict[str, Any]]]:
    """Each list is tried before the next one, which starts from its winner."""
    yield [{"flash_attn": fa, "kv_type": kv} for fa in ("on", "off") for kv in ("f16", "f32")]
    yield [{"ubatch": size} for size in (64, 128)]
    yield [{"batch": defaults.ubatch}]
    yield [{"mmap": False}]
    yield [{"threads": max(1, defaults.threads - 1)}]


def _times_as_fast(
    challenger: LlamaSettings,
    best: LlamaSettings,
    start: Start,
    generate: Generate,
    clock: Callable[[], float],
) -> float:
    """The challenger's speed-up over the best so far, from the least of several turns."""
    with closing(start(best)) as first, closing(start(challenger)) as second:
        least = {first: float("inf"), second: float("inf")}
        for server in least:
            generate(server, [PROMPT[:8]], 1)
        for _ in range(TURNS):
            for server in least:
                before = clock()
                generate(server, [PROMPT], OUTPUT_TOKENS)
                least[server] = min(least[server], clock() - before)
        return least[first] / least[second]
