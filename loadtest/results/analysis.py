"""Figures of a run: by arm and load, block, category, prompt length and second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from outrider.errors import OutriderError
from outrider.loadtest.records import RequestRecord, ShiftPhase
from outrider.loadtest.results.figures import Mask, ended_well, measures_of
from outrider.loadtest.results.measures import Floats, Measures, Series, Slo
from outrider.loadtest.results.series import series_of
from outrider.loadtest.results.tallies import LENGTH_BUCKETS, CellTally, GroupTally, Window
from outrider.loadtest.runs import CellFacts, RunFacts, RunFolder, ServerSample, ShiftRecord

Key = tuple[str, str]  # arm, cell
LATENCIES = ("ttft", "ttft_from_send", "tpot", "e2e")


def analyse(run: RunFolder, slo: Slo | None = None) -> Analysis:
    """Streams the run's files."""
    shifts = run.shifts() or shifts_of(run.requests())
    return Analysis(run.requests(), shifts, run.samples(), facts=run.facts, slo=slo)


def shifts_of(records: Iterable[RequestRecord]) -> list[ShiftRecord]:
    """Reconstructs shifts from requests without a shifts file.

    A window spans the intended times only: a longer one would include the drain.
    """
    seen: dict[tuple[str, str, int], ShiftRecord] = {}
    for record in records:
        if record.phase is ShiftPhase.DISCARDED:
            continue
        key = (record.arm, record.cell, record.block)
        shift = seen.get(key)
        if shift is None:
            at = record.intended_s
            shift = seen[key] = ShiftRecord(*key, at, float("inf"), float("-inf"), record.end_s)
        shift.start_s = min(shift.start_s, record.intended_s)
        shift.end_s = max(shift.end_s, record.end_s)
        if record.phase is ShiftPhase.MEASURED:
            shift.measured_from_s = min(shift.measured_from_s, record.intended_s)
            shift.measured_to_s = max(shift.measured_to_s, record.intended_s)
    return [shift for shift in seen.values() if shift.measured_to_s >= shift.measured_from_s]


class Analysis:
    """Figures of a run for reports, verdicts and thresholds.

    `cells` and `arms` are in the order of the run; an unknown name is an error.
    """

    def __init__(
        self,
        records: Iterable[RequestRecord],
        shifts: list[ShiftRecord],
        samples: list[ServerSample] | None = None,
        *,
        facts: RunFacts | None = None,
        slo: Slo | None = None,
    ) -> None:
        self.facts = facts
        self.slo = slo
        self.all_shifts = shifts
        self.shifts = [shift for shift in shifts if not shift.is_discarded]
        self.samples = samples or []
        self._windows: defaultdict[Key, dict[int, list[Window]]] = defaultdict(dict)
        for shift in self.shifts:
            windows = self._windows[shift.arm, shift.cell].setdefault(shift.block, [])
            windows.append((shift.measured_from_s, shift.measured_to_s))
        self._tallies: dict[Key, CellTally] = {}
        for record in records:
            key = (record.arm, record.cell)
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = CellTally(self._windows[key])
            tally.add(record)
        for tally in self._tallies.values():
            tally.finish()
        self._columns = {key: tally.columns() for key, tally in self._tallies.items()}
        self._of: dict[Key, Measures] = {}
        self._blocks: dict[Key, list[Measures]] = {}

    @cached_property
    def arms(self) -> list[str]:
        listed = [arm.name for arm in self.facts.arms] if self.facts is not None else []
        return list(dict.fromkeys([*listed, *(arm for arm, _ in self._tallies)]))

    @cached_property
    def cells(self) -> list[CellFacts]:
        listed = {cell.name: cell for cell in self.facts.cells} if self.facts is not None else {}
        seen = {cell: listed.get(cell) or cell_of(cell) for _, cell in self._tallies}
        return list((listed | seen).values())

    def of(self, arm: str, cell: str) -> Measures:
        """All blocks together; all zero if the arm did not run."""
        key = self._key(arm, cell)
        if key not in self._of:
            self._of[key] = self._measures(key)
        return self._of[key]

    def blocks(self, arm: str, cell: str) -> list[Measures]:
        """One entry per block, in order."""
        key = self._key(arm, cell)
        if key not in self._blocks:
            made = [self._measures(key, block=block) for block in sorted(self._windows[key])]
            self._blocks[key] = made
        return self._blocks[key]

    def by_category(self, arm: str, cell: str) -> dict[str, Measures]:
        """One entry per category, in alphabetical order."""
        key = self._key(arm, cell)
        tally = self._tallies.get(key)
        if tally is None:
            return {}
        named = sorted(tally.categories.items())
        return {
            name: self._measures(key, part=(name, "category", index, tally.by_category[index]))
            for name, index in named
        }

    def by_length(self, arm: str, cell: str) -> dict[str, Measures]:
        """One entry per non-empty bucket of prompt tokens, shortest first."""
        key = self._key(arm, cell)
        tally = self._tallies.get(key)
        if tally is None:
            return {}
        return {
            LENGTH_BUCKETS[index]: self._measures(
                key, part=(LENGTH_BUCKETS[index], "bucket", index, tally.by_bucket[index])
            )
            for index in sorted(tally.by_bucket)
        }

    def values(self, arm: str, cell: str, measure: str, block: int | None = None) -> Floats:
        """One of `LATENCIES` of every completed measured request, in ms, unsorted."""
        columns = self._columns.get(self._key(arm, cell))
        if measure not in LATENCIES:
            raise OutriderError(f"measure {measure!r} is unknown; use {', '.join(LATENCIES)}.")
        if columns is None:
            return np.empty(0)
        found = columns[measure][ended_well(columns) & _of_block(columns, block)]
        return found[~np.isnan(found)]

    def latencies_by_request(self, arm: str, cell: str, measure: str) -> dict[str, float]:
        """One of `LATENCIES` by request id, in ms; the mean of repeated requests."""
        key = self._key(arm, cell)
        if key not in self._tallies or measure not in LATENCIES:
            return {}
        columns = self._columns[key]
        found: defaultdict[str, list[float]] = defaultdict(list)
        for index in np.flatnonzero(ended_well(columns) & ~np.isnan(columns[measure])).tolist():
            found[self._tallies[key].ids[index]].append(float(columns[measure][index]))
        return {request_id: sum(each) / len(each) for request_id, each in found.items()}

    def series(self, arm: str, cell: str) -> Series:
        key = self._key(arm, cell)
        tally = self._tallies.get(key) or CellTally({})
        shifts = [shift for shift in self.shifts if (shift.arm, shift.cell) == key]
        return series_of(shifts, tally.columns(), tally.tokens_by_second, self.samples)

    def _key(self, arm: str, cell: str) -> Key:
        if arm not in self.arms:
            raise OutriderError(f"arm {arm!r} is unknown; this run has {', '.join(self.arms)}.")
        names = [each.name for each in self.cells]
        if cell not in names:
            raise OutriderError(f"cell {cell!r} is unknown; this run has {', '.join(names)}.")
        return arm, cell

    def _measures(
        self,
        key: Key,
        block: int | None = None,
        part: tuple[str, str, int, GroupTally] | None = None,
    ) -> Measures:
        windows = self._windows[key]
        chosen = list(windows.values()) if block is None else [windows.get(block, [])]
        seconds = sum(end - start for each in chosen for start, end in each)
        cell_tally = self._tallies.get(key)
        if cell_tally is None:
            return Measures(arm=key[0], cell=key[1], block=block, seconds=seconds, sent=0, ok=0)
        columns = self._columns[key]
        mask = _of_block(columns, block)
        if part is not None:
            name, column, index, tally = part
            mask = mask & (columns[column] == index)
        else:
            name, tally = None, _merged(cell_tally, block)
        return measures_of(
            {column: values[mask] for column, values in columns.items()},
            tally,
            key=key,
            block=block,
            part=name,
            seconds=seconds,
            windows=sum(map(len, chosen)),
            slo=self.slo,
        )


def cell_of(name: str) -> CellFacts:
    """Parses a load's name, for runs without `run.json`."""
    kind, _, rest = name.partition(" ")
    last = (rest or "0").split()[-1].removeprefix("x")
    try:
        return CellFacts(name, kind, float(last))
    except ValueError:
        return CellFacts(name, kind, 0.0)


def pairs_of_blocks(
    analysis: Analysis, arm: str, other: str, cell: str
) -> Iterator[tuple[Measures, Measures]]:
    """The same block of two arms, which ran consecutively."""
    others = {measures.block: measures for measures in analysis.blocks(other, cell)}
    for measures in analysis.blocks(arm, cell):
        if measures.block in others:
            yield measures, others[measures.block]


def _of_block(columns: dict[str, Floats], block: int | None) -> Mask:
    if block is None:
        return np.ones(columns["block"].shape, dtype=np.bool_)
    is_of_it: Mask = columns["block"] == block
    return is_of_it


def _merged(cell_tally: CellTally, block: int | None) -> GroupTally:
    if block is not None:
        return cell_tally.by_block.get(block) or GroupTally()
    merged = GroupTally()
    for each in cell_tally.by_block.values():
        merged.merge(each)
    return merged
