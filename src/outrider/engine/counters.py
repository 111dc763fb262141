"""An engine's counters on their way to whoever watches it."""

from __future__ import annotations

from collections import Counter

from outrider.engine.step import StepLoop
from outrider.links.gateway_messages import EngineCounters, ProposerCounters
from outrider.scheduler.outcomes import SchedulerStats


def counters_of(loop: StepLoop) -> EngineCounters:
    """Between steps, on the thread that steps."""
    scheduler = loop.scheduler
    drafted: Counter[int] = Counter()
    verified: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for (_, *numbers), count in scheduler.stats.rounds.items():
        for counts, number in zip((drafted, verified, accepted), numbers, strict=True):
            counts[number] += count
    return EngineCounters(
        prompt_tokens=scheduler.num_prompt_tokens,
        cached_tokens=scheduler.num_cached_tokens,
        verified_tokens=scheduler.stats.verified_tokens,
        rounds_by_drafted=_in_order(drafted),
        rounds_by_verified=_in_order(verified),
        rounds_by_accepted=_in_order(accepted),
        draft_s=loop.draft_s,
        verify_s=loop.verify_s,
        wait_s=loop.wait_s,
        proposers=_proposers(scheduler.stats),
        displaced=scheduler.num_displaced,
        fairness_preemptions=scheduler.num_fairness_preemptions,
        step_tokens=scheduler.stats.step_tokens,
        steps_by_tokens=tuple(scheduler.stats.steps_by_tokens),
    )


def _in_order(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def _proposers(stats: SchedulerStats) -> tuple[ProposerCounters, ...]:
    checked, agreed = Counter(stats.asked), Counter(stats.guessed)
    for (name, _, num_verified, num_accepted), count in stats.rounds.items():
        if name and num_verified:
            # What stands behind the first wrong draft was compared with nothing.
            checked[name] += count * min(num_accepted + 1, num_verified)
            agreed[name] += count * num_accepted
    return tuple(ProposerCounters(name, checked[name], agreed[name]) for name in sorted(checked))
