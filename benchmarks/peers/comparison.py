"""Statistics of timed calls: rates, paired ratios with confidence intervals, equality of texts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from outrider.benchmarks.peers.protocol import Generation, Tokens
from outrider.loadtest.results.draws import Floats
from outrider.loadtest.results.statistics import bootstrap_interval


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One timed call. `case` names the prompt (or batch of prompts), the same for all variants.

    `foreign_cpu` is the share of the machine's processors that other processes used meanwhile,
    `idle_cpu` that of the idle peers; None without `/proc`.
    """

    variant: str
    case: str
    group: str
    generation: Generation
    foreign_cpu: float | None = None
    idle_cpu: float | None = None
    prompt_seconds: float = 0.0  # of a call for one token, made just before

    def after_prompt(self) -> TimedCall:
        """The same call without the prompt and the first token: decoding only."""
        whole = self.generation
        decoded = dataclasses.replace(
            whole,
            token_ids=[tokens[1:] for tokens in whole.token_ids],
            seconds=max(whole.seconds - self.prompt_seconds, 1e-9),
            rounds=max(whole.rounds - len(whole.token_ids), 0),
        )
        return dataclasses.replace(self, generation=decoded)


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """A speed-up with the bounds of a bootstrap over cases."""

    value: float
    low: float
    high: float
    cases: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One variant over all its cases. `same_text` is the share of texts equal to the reference's,
    `common_prefix` the share of tokens before the first difference."""

    variant: str
    cases: int
    median_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_round: float | None
    acceptance: float | None
    same_text: float | None
    common_prefix: float | None


def typical_runs(calls: Iterable[TimedCall], variant: str) -> dict[str, Generation]:
    """The run of median duration of each case; of an even number the faster middle one."""
    by_case: dict[str, list[Generation]] = defaultdict(list)
    for call in calls:
        if call.variant == variant:
            by_case[call.case].append(call.generation)
    return {
        case: sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        for case, runs in by_case.items()
    }


def summarise(calls: Sequence[TimedCall], variant: str, reference: str) -> Summary:
    runs = typical_runs(calls, variant)
    references = typical_runs(calls, reference)
    pairs = [
        (ours, theirs)
        for case, run in runs.items()
        if case in references
        for ours, theirs in zip(run.token_ids, references[case].token_ids, strict=True)
    ]
    tokens = sum(run.num_tokens for run in runs.values())
    rounds = sum(run.rounds for run in runs.values())
    drafted = sum(run.drafted for run in runs.values())
    return Summary(
        variant=variant,
        cases=len(runs),
        median_tokens_per_s=median(run.num_tokens / run.seconds for run in runs.values()),
        total_tokens_per_s=tokens / sum(run.seconds for run in runs.values()),
        tokens_per_round=tokens / rounds if rounds else None,
        acceptance=sum(run.accepted for run in runs.values()) / drafted if drafted else None,
        same_text=fmean(ours == theirs for ours, theirs in pairs) if pairs else None,
        common_prefix=fmean(_common_prefix(*pair) for pair in pairs) if pairs else None,
    )


def speed_ratio(calls: Sequence[TimedCall], variant: str, base: str) -> SpeedRatio | None:
    """Tokens per second of `variant` over those of `base` on the cases both ran, or None.

    The bootstrap draws cases with both variants' runs, so that a prompt's cost to both of them does
    not widen the interval.
    """
    ours, theirs = typical_runs(calls, variant), typical_runs(calls, base)
    cases = [case for case in ours if case in theirs]
    if not cases:
        return None

    def ratio(drawn: Floats) -> Floats:
        chosen = drawn.astype(int)
        return _rate([ours[case] for case in cases], chosen) / _rate(
            [theirs[case] for case in cases], chosen
        )

    interval = bootstrap_interval(range(len(cases)), ratio, seed=0)
    assert interval is not None
    low, high = (interval.value if end is None else end for end in (interval.low, interval.high))
    return SpeedRatio(interval.value, low, high, len(cases))


def _rate(runs: Sequence[Generation], chosen: Any) -> Floats:
    tokens = np.array([run.num_tokens for run in runs], dtype=np.float64)
    seconds = np.array([run.seconds for run in runs], dtype=np.float64)
    rate: Floats = tokens[chosen].sum(axis=-1) / seconds[chosen].sum(axis=-1)
    return rate


def _common_prefix(ours: Tokens, theirs: Tokens) -> float:
    length = max(len(ours), len(theirs))
    for i in range(length):
        if ours[i : i + 1] != theirs[i : i + 1]:
            return i / length
    return 1.0
