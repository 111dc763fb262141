"""Thresholds of a run, for CI: a missed one fails the command.

ttft_p99<500ms                 every arm, every load
d2:e2e_p95<2s                  one arm
d2/off:tokens_s>=1.0           one arm over another, as measured
d2/off:tokens_s>=1.0!          the same by the worse end of the interval
errors==0 @"rate 2"            one load
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.measures import milliseconds
from outrider.loadtest.results.quantities import QUANTITIES, Quantity
from outrider.loadtest.results.verdicts import block_ratio

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(
    r"\s*(?:(?P<arm>[^:/@]+)(?:/(?P<baseline>[^:/@]+))?:)?\s*(?P<name>\w+)\s*"
    r"(?P<sign><=|>=|==|!=|<|>)\s*(?P<limit>[^@!]+?)\s*(?P<strict>!)?\s*"
    r"(?:@\s*(?P<quote>\"?)(?P<cell>[^\"]+)(?P=quote))?\s*"
)


@dataclass(frozen=True, slots=True)
class Threshold:
    text: str
    quantity: Quantity
    sign: str
    limit: float  # in ms, as a share, or plain; of the ratio if there is a baseline
    arm: str | None = None  # None: every arm
    baseline: str | None = None
    cell: str | None = None  # None: every load
    is_strict: bool = False

    @classmethod
    def parse(cls, text: str) -> Threshold:
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"threshold {text!r} cannot be read; write it as ttft_p99<500ms, d2:errors==0, "
                'd2/off:tokens_s>=1.0! or tokens_s>=40 @"rate 2".'
            )
        name = found["name"]
        if name not in QUANTITIES:
            raise ConfigError(f"threshold {text!r} asks for {name!r}; {_choices(name)}.")
        quantity = QUANTITIES[name]
        is_strict = found["strict"] is not None
        if is_strict and (found["baseline"] is None or found["sign"] in ("==", "!=")):
            raise ConfigError(
                f"threshold {text!r} ends in !, which selects the end of a ratio's interval; "
                "use it as d2/off:tokens_s>=1.0!."
            )
        unit = "" if found["baseline"] is not None else quantity.unit
        limit = _limit(found["limit"], unit, text)
        arm, baseline = (part and part.strip() for part in (found["arm"], found["baseline"]))
        cell = found["cell"] and found["cell"].strip()
        return cls(text.strip(), quantity, found["sign"], limit, arm, baseline, cell, is_strict)

    def is_met(self, measured: float) -> bool:
        return _COMPARE[self.sign](measured, self.limit)


@dataclass(frozen=True, slots=True)
class ThresholdResult:
    """Result of a threshold for one arm under one load."""

    threshold: Threshold
    arm: str
    cell: str
    measured: float | None
    met: bool
    remark: str | None = None  # why there is no figure, which counts as not met

    def __str__(self) -> str:
        shown = self.remark if self.measured is None else f"{self.measured:.4g}"
        verdict = "met" if self.met else "NOT met"
        return f"{self.threshold.text}: {verdict} by {self.arm} at {self.cell} ({shown})"


def evaluate(thresholds: Iterable[Threshold], analysis: Analysis) -> list[ThresholdResult]:
    """Checks every threshold on every matching arm and load; without a match it is not met."""
    checked: list[ThresholdResult] = []
    for threshold in thresholds:
        made = list(_checked(threshold, analysis))
        checked += made or [
            ThresholdResult(
                threshold, threshold.arm or "", threshold.cell or "", None, False, "never ran"
            )
        ]
    return checked


def _checked(threshold: Threshold, analysis: Analysis) -> Iterator[ThresholdResult]:
    names = [cell.name for cell in analysis.cells]
    for word, name, known in (
        ("arm", threshold.arm, analysis.arms),
        ("arm", threshold.baseline, analysis.arms),
        ("load", threshold.cell, names),
    ):
        if name is not None and name not in known:
            raise ConfigError(
                f"threshold {threshold.text!r} names the {word} {name!r}; this run has "
                f"{', '.join(known) or 'none'}."
            )
    for cell in names if threshold.cell is None else [threshold.cell]:
        for arm in analysis.arms if threshold.arm is None else [threshold.arm]:
            if threshold.arm is None and not analysis.of(arm, cell).sent:
                continue
            measured, remark = _measured(threshold, analysis, arm, cell)
            is_met = measured is not None and threshold.is_met(measured)
            yield ThresholdResult(threshold, arm, cell, measured, is_met, remark)


def _measured(
    threshold: Threshold, analysis: Analysis, arm: str, cell: str
) -> tuple[float | None, str | None]:
    quantity = threshold.quantity
    if not analysis.of(arm, cell).sent:
        return None, "never ran"
    if threshold.baseline is None:
        value = quantity.of(analysis.of(arm, cell))
        return value, "not measured" if value is None else None
    ratio = block_ratio(analysis, arm, threshold.baseline, cell, quantity)
    if threshold.is_strict:
        end = ratio.low if threshold.sign in (">", ">=") else ratio.high
        return end, (ratio.remark or "cannot be said") if end is None else None
    return ratio.value, ratio.remark if ratio.value is None else None


def _limit(limit: str, unit: str, text: str) -> float:
    if unit == "ms":
        return milliseconds(limit, f"threshold {text!r}")
    is_percent = unit == "share" and limit.endswith("%")
    try:
        number = float(limit.removesuffix("%") if is_percent else limit)
    except ValueError:
        kind = "a number" if unit == "" else "a share, as 0.01 or 1%"
        raise ConfigError(f"threshold {text!r} has the limit {limit!r}; give {kind}.") from None
    return number / 100 if is_percent else number


def _choices(name: str) -> str:
    near = difflib.get_close_matches(name, QUANTITIES, n=3)
    if near:
        return f"did you mean {' or '.join(near)}"
    plain = [each for each, quantity in QUANTITIES.items() if quantity.unit != "ms"]
    return (
        f"choose of {', '.join(plain)}, or ttft, ttft_from_send, tpot, gap, itl or e2e with _p50, "
        "_p90, _p95, _p99, _mean or _max"
    )
