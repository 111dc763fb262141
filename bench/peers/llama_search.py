"""The fastest settings of llama.cpp on this machine, found by trying.

From its defaults one choice after another is varied; attention and the type of the KV cache, which
depend on each other, are varied together. A challenger runs in turns with the best so far, and
takes its place only if it is faster by more than chance; in the end the best meets the defaults
once more, and gives way to them unless it wins again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.peers.llama_servers import LlamaSettings, Server
from outrider.bench.peers.protocol import Tokens

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
PROMPT: Tokens = [100 + i * 7 % 400 for i in range(PROMPT_TOKENS)]  # ids of any vocabulary
TURNS = 3
LEAST_GAIN = 0.02
Start = Callable[[LlamaSettings], Server]
Generate = Callable[[Server, list[Tokens], int], object]


@dataclass(frozen=True, slots=True)
class Found:
    """`gain` is how many times as fast as the defaults the settings were."""

    settings: LlamaSettings
    tried: int
    gain: float

    def told(self) -> str:
        return f"fastest of {self.tried} tried, {self.gain:.2f} times as fast as its defaults"


def find_fastest(
    defaults: LlamaSettings,
    start: Start,
    generate: Generate,
    clock: Callable[[], float] = time.perf_counter,
) -> Found:
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
        return Found(defaults, tried, 1.0)
    gain = _times_as_fast(best, defaults, start, generate, clock)
    return Found(best, tried, gain) if gain > 1 + LEAST_GAIN else Found(defaults, tried, 1.0)


def _choices(defaults: LlamaSettings) -> Iterator[list[dict[str, Any]]]:
    """Each list is gone through before the next, which starts from its winner."""
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
    """As the best so far: the least of several turns counts."""
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
