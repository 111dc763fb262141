"""The speed findings of a run in sentences: which arm helps, at what load, by how much."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.measures import Measures
from outrider.loadtest.results.quantities import percent
from outrider.loadtest.results.settings import (
    load_name,
    setting_label,
    setting_of,
    settings_of,
)
from outrider.loadtest.results.verdicts import (
    CLOSED_LOOP,
    COSTS,
    HELPS,
    NO_DIFFERENCE,
    TOO_FEW,
    Contrast,
    baseline_of,
    contrasts,
)
from outrider.loadtest.runs import CellFacts

_UNITS = {"rate": "requests a second", "clients": "clients"}
_ONE = {"rate": "request a second", "clients": "client"}
# Names of arms that only state the depth.
_PLAIN_NAME = r"(?:d|k|n|depth|spec|speculation)[ =:_-]*{depth}"
_VERBS = {HELPS: "helps", COSTS: "costs"}


@dataclass(frozen=True, slots=True)
class SpeedFinding:
    """The sentences at the top of a report, and the most important one as the headline."""

    headline: str
    sentences: list[str]


def finding(analysis: Analysis, baseline: str | None = None) -> SpeedFinding | None:
    """None if no request was sent."""
    against = baseline or baseline_of(analysis)
    decisive = [each for each in contrasts(analysis, against) if each.is_decisive]
    described = [
        _summary_of(analysis.of(arm, cell.name), cell)
        for cell in analysis.cells
        for arm in analysis.arms
        if analysis.of(arm, cell.name).sent
    ]
    if not decisive:
        return SpeedFinding(described[0], described) if described else None
    if all(each.outcome == TOO_FEW for each in decisive):
        reason = _reason(decisive[0])
        unsure = f"Whether an arm differs from “{against}” cannot be said: {reason}."
        return SpeedFinding(unsure, [unsure, *described])
    settings = settings_of(analysis.cells)
    stretches = [
        stretch for setting in settings for stretch in _stretches(analysis, decisive, setting)
    ]
    sentences = [stretch.sentence for stretch in stretches]
    kept_up = _kept_up_sentences(analysis, decisive)
    if len(settings) == 1:
        return SpeedFinding(max(stretches, key=_Stretch.weight).headline, sentences + kept_up)
    counts = _counts(analysis, decisive)
    counted = [each.sentence for each in counts]
    return SpeedFinding(
        max(counts, key=_OutcomeCount.weight).headline, counted + kept_up + sentences
    )


def arm_title(analysis: Analysis, arm: str) -> str:
    """The title of an arm: its depth if its extras set one, and its name if that says more."""
    facts = analysis.facts
    extras = next((each.extras for each in facts.arms if each.name == arm), {}) if facts else {}
    proposer, depth = extras.get("speculation"), extras.get("num_speculative_tokens")
    if proposer == "off" or not depth:
        return f"“{arm}”"
    if re.fullmatch(_PLAIN_NAME.format(depth=re.escape(str(depth))), arm, re.IGNORECASE):
        return f"Speculation of depth {depth}"
    return f"“{arm}”" if str(depth) in arm else f"“{arm}” (depth {depth})"


def where(cells: Sequence[CellFacts]) -> str:
    """ "4 requests a second", "1 to 8 clients"; loads must be of one kind and in order."""
    kind = cells[0].kind
    if kind not in _UNITS:
        names = [load_name(cell) for cell in cells]
        return names[0] if len(cells) == 1 else f"{names[0]} to {names[-1]}"
    first, last = cells[0].value, cells[-1].value
    if len(cells) > 1:
        return f"{first:g} to {last:g} {_UNITS[kind]}"
    return f"{first:g} {_ONE[kind] if first == 1 else _UNITS[kind]}"


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _loads_text(cells: Sequence[CellFacts]) -> str:
    """ "5 and 20 requests a second"; loads of any kinds."""
    parts = []
    for kind, of_kind in groupby(cells, key=lambda cell: cell.kind):
        together = list(of_kind)
        if kind not in _UNITS or len(together) == 1:
            parts += [where([cell]) for cell in together]
        else:
            parts.append(f"{listed([f'{each.value:g}' for each in together])} {_UNITS[kind]}")
    return listed(parts)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive loads of one kind with the same outcome for an arm."""

    title: str
    place: str
    contrasts: list[Contrast]
    setting: str = ""  # if a run has several

    def weight(self) -> tuple[bool, float]:
        """Importance: significant outcomes first, then the size of the effect."""
        return self._outcome in _VERBS, max(map(_effect, self.contrasts))

    @property
    def _outcome(self) -> str:
        return self.contrasts[0].outcome

    @property
    def sentence(self) -> str:
        setting = f"{self.setting}: " if self.setting else ""
        if self._outcome == TOO_FEW:
            return f"{setting}{self._claim}: {_reason(self.contrasts[0])}."
        return f"{setting}{self._claim}: {_changes(self.contrasts)}."

    @property
    def headline(self) -> str:
        """States only the largest change."""
        if self._outcome not in _VERBS:
            return f"{self._claim}."
        largest = max(self.contrasts, key=_effect)
        assert largest.ratio.value is not None
        upto = "up to " if len(self.contrasts) > 1 else ""
        return f"{self._claim}: {upto}{largest.quantity.change(largest.ratio.value)}."

    @property
    def _claim(self) -> str:
        against = self.contrasts[0].baseline
        if self._outcome in _VERBS:
            return f"{self.title} {_VERBS[self._outcome]} {self.place}"
        if self._outcome == NO_DIFFERENCE:
            return f"No difference shown between {_inside(self.title)} and “{against}” {self.place}"
        return f"Whether {_inside(self.title)} differs from “{against}” {self.place} is unknown"


def _stretches(
    analysis: Analysis, decisive: list[Contrast], setting: tuple[str, float | None]
) -> list[_Stretch]:
    named = setting_label(setting, settings_of(analysis.cells))
    found = []
    for arm in analysis.arms:
        own = [each for each in decisive if each.arm == arm and setting_of(each.cell) == setting]
        own.sort(key=lambda each: (each.cell.kind, each.cell.value, each.cell.name))
        for _, of_kind in groupby(own, key=lambda each: each.cell.kind):
            alike = [
                list(each)
                for _, each in groupby(of_kind, key=lambda one: (one.outcome, one.quantity.name))
            ]
            for index, stretch in enumerate(alike):
                place = _place(stretch, is_first=index == 0, is_last=index == len(alike) - 1)
                found.append(_Stretch(arm_title(analysis, arm), place, stretch, named))
    return found


def _place(stretch: list[Contrast], *, is_first: bool, is_last: bool) -> str:
    cells = [each.cell for each in stretch]
    if len(cells) == 1 or cells[0].kind not in _UNITS or is_first == is_last:
        return f"at {where(cells)}"
    return f"up to {where(cells[-1:])}" if is_first else f"from {where(cells[:1])} on"


def _inside(title: str) -> str:
    """A title inside a sentence."""
    return title.replace("Speculation", "speculation", 1)


def _reason(contrast: Contrast) -> str:
    return (contrast.ratio.remark or "nothing to compare").removesuffix(" to say")


def _effect(contrast: Contrast) -> float:
    value = contrast.ratio.value
    return abs(math.log(value)) if value is not None and value > 0 else 0.0


def _changes(stretch: list[Contrast]) -> str:
    """The first and the last change of a stretch, with intervals."""
    if len(stretch) == 1:
        return _change(stretch[0])
    first, last = stretch[0], stretch[-1]
    return (
        f"{_change(first)} at {first.cell.value:g}, "
        f"{_change(last, is_named=False)} at {last.cell.value:g}"
    )


def _change(contrast: Contrast, *, is_named: bool = True) -> str:
    """ "23 % more tokens/s (19 to 27 %)"; a signed interval if it is not significant."""
    ratio, quantity = contrast.ratio, contrast.quantity
    if ratio.value is None or ratio.low is None or ratio.high is None:
        return quantity.title
    if not contrast.is_significant:
        low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
        name = f"{quantity.title} " if is_named else ""
        return f"{name}{100 * (ratio.value - 1):+.1f} % ({low:+.1f} to {high:+.1f} %)"
    least, largest = sorted(abs(end - 1) for end in (ratio.low, ratio.high))
    interval = f"({percent(least).removesuffix(' %')} to {percent(largest)})"
    change = quantity.change(ratio.value) if is_named else percent(ratio.value - 1)
    return f"{change} {interval}"


@dataclass(frozen=True, slots=True)
class _OutcomeCount:
    """Outcome counts of one arm over all cells."""

    title: str
    contrasts: list[Contrast]

    def weight(self) -> tuple[int, float]:
        """Importance: number of significant outcomes, then the size of the effect."""
        return len(self._with(HELPS) + self._with(COSTS)), max(map(_effect, self.contrasts))

    def _with(self, outcome: str) -> list[Contrast]:
        return [each for each in self.contrasts if each.outcome == outcome]

    @property
    def headline(self) -> str:
        words = {
            HELPS: "helps in",
            COSTS: "costs in",
            NO_DIFFERENCE: "shows no difference in",
            TOO_FEW: "has too few blocks to say in",
        }
        total = len(self.contrasts)
        nums = {outcome: len(self._with(outcome)) for outcome in words if self._with(outcome)}
        if len(nums) == 1:
            return f"{self.title} {words[next(iter(nums))]} all {total} cells."
        parts = [f"{words[outcome]} {num}" for outcome, num in nums.items()]
        parts[0] += f" of {total} cells"
        return f"{self.title} {listed(parts)}."

    @property
    def sentence(self) -> str:
        """The headline with the cells of the largest effects."""
        text = self.headline.removesuffix(".")
        for outcome, verb in _VERBS.items():
            if alike := self._with(outcome):
                largest = max(alike, key=_effect)
                text += f"; it {verb} most at {largest.cell.name}: {_change(largest)}"
        return f"{text}."


def _counts(analysis: Analysis, decisive: list[Contrast]) -> list[_OutcomeCount]:
    by_arm = {arm: [each for each in decisive if each.arm == arm] for arm in analysis.arms}
    return [_OutcomeCount(arm_title(analysis, arm), own) for arm, own in by_arm.items() if own]


def _kept_up_sentences(analysis: Analysis, decisive: list[Contrast]) -> list[str]:
    """Which arms kept up, which determines the decisive quantity."""
    is_matrix = len(settings_of(analysis.cells)) > 1
    open_loop = [each for each in decisive if each.cell.kind != CLOSED_LOOP]
    cells = {each.cell.name: each.cell for each in open_loop}
    slow_cells = {each.cell.name for each in open_loop if each.quantity.unit != "ms"}
    quick = {name: cell for name, cell in cells.items() if name not in slow_cells}
    sentences = []
    if quick:
        ordered = sorted(quick.values(), key=lambda cell: (cell.kind, cell.value))
        places = f"At {_loads_text(ordered)}"
        if is_matrix:
            num = "all" if len(quick) == len(cells) else f"{len(quick)} of {len(cells)}"
            places = f"In {num} cells"
        sentences.append(
            f"{places} the arms kept up, so arrivals set the tokens/s and latency is decisive."
        )
    for arm in analysis.arms:
        slow = [
            (cell, measures.requests_s / measures.offered_s)
            for cell in sorted(cells.values(), key=lambda cell: (cell.kind, cell.value))
            if not (measures := analysis.of(arm, cell.name)).kept_up
            if measures.requests_s is not None and measures.offered_s
        ]
        if slow:
            names = _loads_text([cell for cell, _ in slow])
            if is_matrix:
                names = "; ".join(cell.name for cell, _ in slow)
            shares = listed([percent(share) for _, share in slow])
            sentences.append(
                f"“{arm}” did not keep up at {names}: it finished {shares} of the requests sent."
            )
    return sentences


def _summary_of(measures: Measures, cell: CellFacts) -> str:
    parts = [f"{measures.ok} of {measures.sent} requests answered"]
    if measures.output_tokens_s is not None:
        parts.append(f"{measures.output_tokens_s:.3g} tokens/s")
    if measures.ttft is not None:
        parts.append(f"first token after {measures.ttft.p50:.0f} ms (p99 {measures.ttft.p99:.0f})")
    if measures.e2e is not None:
        parts.append(f"whole answer after {measures.e2e.p50:.0f} ms (p99 {measures.e2e.p99:.0f})")
    is_named = cell.text or cell.kind not in _UNITS
    place = cell.name if is_named else where([cell])
    return f"“{measures.arm}” at {place}: {', '.join(parts)}."
