"""Figures from samples: rates, paired ratios with confidence intervals, agreement of texts."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from outrider.bench.peers.protocol import Generation, Tokens

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed call. `case` names the prompt (or batch of prompts) all variants were given.

    `foreign_cpu` is the share of the machine's processors that others used meanwhile, `idle_cpu`
    the share of peers that should have slept; None where the system does not tell.
    """

    variant: str
    case: str
    group: str
    generation: Generation
    foreign_cpu: float | None = None
    idle_cpu: float | None = None
    prompt_seconds: float = 0.0  # of a call for one token, made just before

    def after_prompt(self) -> Sample:
        """The same without the prompt and the first token: what decoding alone took."""
        whole = self.generation
        decoded = dataclasses.replace(
            whole,
            token_ids=[tokens[1:] for tokens in whole.token_ids],
            seconds=max(whole.seconds - self.prompt_seconds, 1e-9),
            rounds=max(whole.rounds - len(whole.token_ids), 0),
        )
        return dataclasses.replace(self, generation=decoded)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster, with the bounds of a bootstrap over cases."""

    value: float
    low: float
    high: float
    cases: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One variant over all its cases. A text agrees if it equals the reference's, token by token;
    `common_prefix` is the share of tokens before the first difference."""

    variant: str
    cases: int
    median_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_round: float | None
    acceptance: float | None
    same_text: float | None
    common_prefix: float | None


def typical_runs(samples: Iterable[Sample], variant: str) -> dict[str, Generation]:
    """For each case the run of median duration; of an even number the faster of the middle two."""
    by_case: dict[str, list[Generation]] = defaultdict(list)
    for sample in samples:
        if sample.variant == variant:
            by_case[sample.case].append(sample.generation)
    return {
        case: sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        for case, runs in by_case.items()
    }


def summarise(samples: Sequence[Sample], variant: str, reference: str) -> Summary:
    runs = typical_runs(samples, variant)
    references = typical_runs(samples, reference)
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
        common_prefix=fmean(_shared_start(*pair) for pair in pairs) if pairs else None,
    )


def speed_ratio(samples: Sequence[Sample], variant: str, base: str) -> Ratio | None:
    """Tokens per second of `variant` over those of `base` on the cases both ran, or None.

    Cases are drawn with replacement, both variants' runs together: what a long prompt costs both
    of them does not widen the interval.
    """
    ours, theirs = typical_runs(samples, variant), typical_runs(samples, base)
    cases = [case for case in ours if case in theirs]
    if not cases:
        return None
    draw = random.Random(0)  # the same samples always give the same interval
    ratios = sorted(
        _ratio(ours, theirs, draw.choices(cases, k=len(cases))) for _ in range(RESAMPLES)
    )
    cut = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Ratio(_ratio(ours, theirs, cases), ratios[cut], ratios[-1 - cut], len(cases))


def _ratio(
    ours: dict[str, Generation], theirs: dict[str, Generation], cases: Sequence[str]
) -> float:
    return _rate(ours, cases) / _rate(theirs, cases)


def _rate(runs: dict[str, Generation], cases: Sequence[str]) -> float:
    return sum(runs[case].num_tokens for case in cases) / sum(runs[case].seconds for case in cases)


def _shared_start(ours: Tokens, theirs: Tokens) -> float:
    length = max(len(ours), len(theirs))
    for i in range(length):
        if ours[i : i + 1] != theirs[i : i + 1]:
            return i / length
    return 1.0
