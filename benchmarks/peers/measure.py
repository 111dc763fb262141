"""Interleaved timed calls: each case runs on all variants before the next one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from outrider.benchmarks.peers.comparison import TimedCall
from outrider.benchmarks.peers.process import PeerProcess
from outrider.benchmarks.peers.protocol import Generation, Mode, Tokens
from outrider.loadtest.servers.cpu_clock import machine_cpu_s


@dataclass(frozen=True, slots=True)
class PeerVariant:
    """A named way to generate: the peer's process and its draft mode."""

    name: str
    peer: str
    mode: Mode


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts that run as one batch."""

    name: str
    group: str
    prompts: tuple[Tokens, ...]


def run_interleaved(
    peers: Mapping[str, PeerProcess],
    variants: Sequence[PeerVariant],
    cases: Sequence[Case],
    *,
    max_tokens: int,
    repeats: int,
    on_call: Callable[[TimedCall], None],
) -> list[TimedCall]:
    """All variants on all cases. The first variant rotates from case to case, so that neither a
    warm cache nor a drift of the machine favours one."""
    calls: list[TimedCall] = []
    for turn, case in enumerate([*cases] * repeats):
        first = turn % len(variants)
        for variant in [*variants[first:], *variants[:first]]:
            call = measure(peers, variant, case, max_tokens)
            calls.append(call)
            on_call(call)
    return calls


def measure(
    peers: Mapping[str, PeerProcess], variant: PeerVariant, case: Case, max_tokens: int
) -> TimedCall:
    """Time one call and its prompt alone, and record other CPU use meanwhile; the other peers are
    stopped."""
    active = peers[variant.peer]
    idle = [peer for peer in peers.values() if peer is not active]
    with ExitStack() as stack:
        for peer in idle:
            stack.enter_context(peer.at_rest())
        prompt_s = active.generate(case.prompts, 1, variant.mode).seconds
        before = _Clocks.read(active, idle)
        generation = active.generate(case.prompts, max_tokens, variant.mode)
        foreign, idle_cpu = _Clocks.read(active, idle).shares_since(before)
    return TimedCall(variant.name, case.name, case.group, generation, foreign, idle_cpu, prompt_s)


def warm_up(peer: PeerProcess, variant: PeerVariant, prompt: Tokens, max_tokens: int) -> Generation:
    """Keep compilation, caches and page faults out of the timings."""
    return peer.generate([prompt], max_tokens, variant.mode)


@dataclass(frozen=True, slots=True)
class _Clocks:
    wall_s: float
    machine_s: float | None
    ours_s: float | None  # this process and every peer
    idle_s: float | None

    @classmethod
    def read(cls, active: PeerProcess, idle: Sequence[PeerProcess]) -> _Clocks:
        idle_s = _total([peer.cpu_s() for peer in idle])
        ours = _total([idle_s, active.cpu_s(), time.process_time()])
        return cls(time.perf_counter(), machine_cpu_s(), ours, idle_s)

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
