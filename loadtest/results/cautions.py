"""Caveats of a run's figures, one sentence each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from outrider.loadtest.records import CountedBy
from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.measures import Measures
from outrider.loadtest.results.quantities import percent
from outrider.loadtest.results.verdicts import CLOSED_LOOP, baseline_of

LATE_MS = 20.0  # of a client's event loop, p99
IDLE_CORES = 0.05  # that arms which are not measured may use
CACHED = 0.01  # of prompt tokens
LENGTH_DIFFERENCE = 0.02
MAX_NAMED = 3  # loads that have a sentence each


def cautions(analysis: Analysis) -> list[str]:
    """The most severe first; empty if there are none."""
    sentences = [*_of_prompts(analysis), *_of_client(analysis), *_of_machine(analysis)]
    every = [analysis.of(arm, cell.name) for arm in analysis.arms for cell in analysis.cells]
    for arm in analysis.arms:
        sentences += _of_arm(arm, [each for each in every if each.arm == arm and each.sent])
    return [*sentences, *_of_lengths(analysis), *_of_loop(analysis)]


def _of_prompts(analysis: Analysis) -> Iterator[str]:
    if analysis.facts is not None and not analysis.facts.is_natural:
        yield "The prompts are random tokens, so acceptance is not representative."


def _of_client(analysis: Analysis) -> Iterator[str]:
    bound = [shift for shift in analysis.shifts if shift.is_client_bound]
    if bound:
        names = ", ".join(dict.fromkeys(f"{each.arm} at {each.cell}" for each in bound))
        yield (
            f"The client was the bottleneck in {len(bound)} of {len(analysis.shifts)} shifts "
            f"({names}): their latencies are partly its own."
        )
    late = [s for s in analysis.shifts if not s.is_client_bound and s.loop_delay_p99_ms > LATE_MS]
    if late:
        worst = max(shift.loop_delay_p99_ms for shift in late)
        yield (
            f"The client lacked CPU time in {len(late)} of {len(analysis.shifts)} shifts: "
            f"latencies there are too long by up to {worst:.0f} ms."
        )
    discarded = len(analysis.all_shifts) - len(analysis.shifts)
    if discarded:
        yield (
            f"{_number(discarded, 'shift')} in which the client was the bottleneck "
            f"{'was' if discarded == 1 else 'were'} discarded and measured again."
        )


def _of_machine(analysis: Analysis) -> Iterator[str]:
    busy = [
        shift
        for shift in analysis.shifts
        if (shift.idle_arms_cpu_s or 0.0) > IDLE_CORES * (shift.end_s - shift.start_s)
    ]
    if busy:
        used = sum(shift.idle_arms_cpu_s or 0.0 for shift in busy)
        seconds = sum(shift.end_s - shift.start_s for shift in busy)
        yield (
            f"Servers that were not being measured used {used:.1f} s of CPU during {seconds:.0f} s "
            f"of {_number(len(busy), 'shift')}, which the measured server may have lacked."
        )


def _of_arm(arm: str, ran: list[Measures]) -> Iterator[str]:
    sent = sum(each.sent for each in ran)
    errors: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for each in ran:
        errors.update(each.errors)
        counted.update(each.counted_by)
    failed, timed_out = sum(errors.values()), sum(each.timed_out for each in ran)
    if failed or timed_out:
        kinds = ", ".join(f"{num} {kind}" for kind, num in errors.most_common())
        parts = [f"failed {failed} of {sent} requests ({kinds})"] if failed else []
        if timed_out:
            parts.append(f"timed out on {timed_out}" + ("" if failed else f" of {sent} requests"))
        yield f"“{arm}” {' and '.join(parts)}: no latency counts them."
    retries = sum(each.retries for each in ran)
    if retries:
        yield f"“{arm}” needed {_number(retries, 'retry', 'retries')}, which its latencies include."
    cached = max((each.cached_share or 0.0 for each in ran), default=0.0)
    if cached > CACHED:
        yield (
            f"“{arm}” had up to {percent(cached)} of prompt tokens in its prefix cache: its time "
            "to the first token is that of a warm cache."
        )
    for counter, words in (
        (CountedBy.TOKENISER, "by tokenising the text of {0}, which may differ from its tokens"),
        (CountedBy.UNKNOWN, "by neither server nor client for {0}: token figures exclude them"),
    ):
        if counted[counter]:
            answers = f"{counted[counter]} of {sum(counted.values())} answers"
            yield f"Tokens of “{arm}” were counted {words.format(answers)}."


def _of_lengths(analysis: Analysis) -> Iterator[str]:
    """A sentence per load, or one for all if there are many."""
    baseline = baseline_of(analysis)
    advice = "read the time per token there, not the time to the whole answer."
    for arm in analysis.arms:
        if baseline is None or arm == baseline:
            continue
        ratios = {}
        for cell in analysis.cells:
            mine = analysis.of(arm, cell.name).output_tokens
            other = analysis.of(baseline, cell.name).output_tokens
            if mine is not None and other is not None and other.mean:
                ratio = mine.mean / other.mean
                if abs(ratio - 1) > LENGTH_DIFFERENCE:
                    ratios[cell.name] = ratio
        if len(ratios) > MAX_NAMED:
            largest = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
            yield (
                f"Answers of “{arm}” are not as long as those of “{baseline}” at {len(ratios)} of "
                f"{len(analysis.cells)} loads, up to {percent(largest - 1)} "
                f"{'longer' if largest > 1 else 'shorter'}: {advice}"
            )
            continue
        for name, ratio in ratios.items():
            yield (
                f"Answers of “{arm}” are {percent(ratio - 1)} "
                f"{'longer' if ratio > 1 else 'shorter'} than those of “{baseline}” at {name}: "
                f"{advice}"
            )


def _of_loop(analysis: Analysis) -> Iterator[str]:
    if any(cell.kind == CLOSED_LOOP for cell in analysis.cells):
        yield (
            "In a closed loop a slow server gets fewer requests, so its latencies omit those that "
            "would have arrived meanwhile (coordinated omission): compare tokens/s here, and "
            "latencies in an open loop."
        )


def _number(num: int, noun: str, plural: str | None = None) -> str:
    return f"{num} {noun if num == 1 else plural or noun + 's'}"
