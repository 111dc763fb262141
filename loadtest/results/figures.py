"""Computes the figures of a group of requests from its rows and counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from outrider.loadtest.records import RequestOutcome
from outrider.loadtest.results.measures import (
    Floats,
    Goodput,
    Measures,
    Slo,
    SpeculationMeasures,
    Spread,
)
from outrider.loadtest.results.tallies import OUTCOMES, GroupTally

Mask = NDArray[np.bool_]


def measures_of(
    columns: dict[str, Floats],
    tally: GroupTally,
    *,
    key: tuple[str, str],
    block: int | None,
    part: str | None,
    seconds: float,
    windows: int,
    slo: Slo | None,
) -> Measures:
    measured = columns["is_measured"] == 1
    of_measured = {name: values[measured] for name, values in columns.items()}
    outcomes = Counter(OUTCOMES[int(index)] for index in of_measured["outcome"])
    good = {name: values[ended_well(columns)] for name, values in columns.items()}
    all_ok = columns["outcome"] == OUTCOMES.index(RequestOutcome.OK)
    sent = int(measured.sum())
    by_tokens = dict(sorted(tally.updates_by_tokens.items()))
    return Measures(
        arm=key[0],
        cell=key[1],
        block=block,
        part=part,
        seconds=seconds,
        windows=windows,
        sent=sent,
        ok=outcomes[RequestOutcome.OK],
        errors=dict(tally.errors.most_common()),
        timed_out=outcomes[RequestOutcome.TIMEOUT],
        retries=int(of_measured["retries"].sum()),
        ttft=Spread.of(good["ttft"]),
        ttft_from_send=Spread.of(good["ttft_from_send"]),
        e2e=Spread.of(good["e2e"]),
        tpot=Spread.of(good["tpot"]),
        gap=tally.gap.spread(),
        itl=tally.itl.spread(),
        tokens_per_update=Spread.of_counts(
            np.array(list(by_tokens), dtype=np.float64), np.array(list(by_tokens.values()))
        ),
        updates_by_tokens=by_tokens,
        output_tokens_s=_a_second(float(columns["tokens_in_window"].sum()), seconds),
        requests_s=_a_second(int((all_ok & (columns["ended_in_window"] == 1)).sum()), seconds),
        offered_s=_a_second(sent, seconds),
        open_at_start=int(columns["open_at_start"].sum()),
        open_at_end=int(columns["open_at_end"].sum()),
        goodput=None if slo is None else _goodput(slo, good, sent, seconds),
        speculation=_speculation(good, tally),
        cached_share=_cached_share(good),
        counted_by=dict(tally.counted_by.most_common()),
        prompt_tokens=Spread.of(good["prompt_tokens"]),
        output_tokens=Spread.of(good["output_tokens"]),
    )


def ended_well(columns: dict[str, Floats]) -> Mask:
    """Mask of completed measured requests."""
    is_ok: Mask = columns["outcome"] == OUTCOMES.index(RequestOutcome.OK)
    is_good: Mask = is_ok & (columns["is_measured"] == 1)
    return is_good


def _a_second(number: float, seconds: float) -> float | None:
    return number / seconds if seconds > 0 else None


def _goodput(slo: Slo, good: dict[str, Floats], sent: int, seconds: float) -> Goodput:
    met = int(slo.met(good["ttft"], good["tpot"], good["e2e"]).sum())
    return Goodput(slo, met, met / sent if sent else None, _a_second(met, seconds))


def _speculation(good: dict[str, Floats], tally: GroupTally) -> SpeculationMeasures | None:
    reported = good["rounds"] > 0
    rounds, drafted, accepted, committed = (
        int(good[name][reported].sum())
        for name in ("rounds", "drafted", "accepted", "output_tokens")
    )
    max_accepted = max(tally.rounds_by_accepted, default=-1)
    by_accepted = [tally.rounds_by_accepted[index] for index in range(max_accepted + 1)]
    return SpeculationMeasures.of(rounds, drafted, accepted, committed, by_accepted)


def _cached_share(good: dict[str, Floats]) -> float | None:
    reported = ~np.isnan(good["cached_tokens"]) & ~np.isnan(good["prompt_tokens"])
    prompts = float(good["prompt_tokens"][reported].sum())
    return float(good["cached_tokens"][reported].sum()) / prompts if prompts else None
