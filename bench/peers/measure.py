"""Timed calls, interleaved: every case is given to all variants in turn before the next one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from outrider.bench.peers.comparison import Sample
from outrider.bench.peers.cpu_clock import machine_cpu_s
from outrider.bench.peers.process import PeerProcess
from outrider.bench.peers.protocol import Generation, Mode, Tokens


@dataclass(frozen=True, slots=True)
class Variant:
    """A named way to generate: which process is asked, and how it shall draft."""

    name: str
    peer: str
    mode: Mode


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts that go in together."""

    name: str
    group: str
    prompts: tuple[Tokens, ...]


def run_interleaved(
    peers: Mapping[str, PeerProcess],
    variants: Sequence[Variant],
    cases: Sequence[Case],
    *,
    max_tokens: int,
    repeats: int,
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    """All variants on all cases. Who begins changes from case to case, so that neither a warm
    cache nor a drift of the machine favours anyone."""
    samples: list[Sample] = []
    for turn, case in enumerate([*cases] * repeats):
        first = turn % len(variants)
        for variant in [*variants[first:], *variants[:first]]:
            sample = measure(peers, variant, case, max_tokens)
            samples.append(sample)
            on_sample(sample)
    return samples


def measure(
    peers: Mapping[str, PeerProcess], variant: Variant, case: Case, max_tokens: int
) -> Sample:
    """One call, what its prompt alone takes, and what the rest of the machine did meanwhile, the
    other peers being stopped."""
    active = peers[variant.peer]
    idle = [peer for peer in peers.values() if peer is not active]
    with ExitStack() as stack:
        for peer in idle:
            stack.enter_context(peer.at_rest())
        prompt_s = active.generate(case.prompts, 1, variant.mode).seconds
        before = _Clocks.read(active, idle)
        generation = active.generate(case.prompts, max_tokens, variant.mode)
        foreign, resting = _Clocks.read(active, idle).shares_since(before)
    return Sample(variant.name, case.name, case.group, generation, foreign, resting, prompt_s)


def warm_up(peer: PeerProcess, variant: Variant, prompt: Tokens, max_tokens: int) -> Generation:
    """Compilation, caches and page faults belong to nobody's figures."""
    return peer.generate([prompt], max_tokens, variant.mode)


@dataclass(frozen=True, slots=True)
class _Clocks:
    wall_s: float
    machine_s: float | None
    ours_s: float | None  # this process and every peer
    idle_s: float | None

    @classmethod
    def read(cls, active: PeerProcess, idle: Sequence[PeerProcess]) -> _Clocks:
        resting = _total([peer.cpu_s() for peer in idle])
        ours = _total([resting, active.cpu_s(), time.process_time()])
        return cls(time.perf_counter(), machine_cpu_s(), ours, resting)

    def shares_since(self, before: _Clocks) -> tuple[float | None, float | None]:
        """(others', idle peers') share of all processors; clock ticks make it rough, never < 0."""
        capacity_s = (self.wall_s - before.wall_s) * (os.cpu_count() or 1)
        machine = _difference(self.machine_s, before.machine_s)
        ours = _difference(self.ours_s, before.ours_s)
        idle = _difference(self.idle_s, before.idle_s)
        foreign = None if machine is None or ours is None else max(0.0, machine - ours) / capacity_s
        return foreign, None if idle is None else idle / capacity_s


def _total(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
