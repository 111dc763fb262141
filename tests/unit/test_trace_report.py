"""Spans of several processes as one trace, and the critical path of a round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.trace import FOLDER_VARIABLE, TracedMethod, TraceSpan, traced
from outrider.trace_report import (
    RoundTimes,
    by_step,
    chrome_trace,
    medians,
    message_counts,
    read_spans,
    rounds,
)

MS = 1_000_000


def span(name: str, step: int, begin_ms: float, end_ms: float) -> TraceSpan:
    return TraceSpan(name, step, int(begin_ms * MS), int(end_ms * MS))


def processes() -> dict[str, list[TraceSpan]]:
    """Rounds of 10 ms: 1 to the draft, 2 there, 1 back, 6 to verify."""
    found: dict[str, list[TraceSpan]] = {"draft": [], "target": []}
    for step in range(1, 6):
        at = 10.0 * step
        found["draft"].append(span("draft", step, at + 1, at + 3))
        found["draft"].append(span("send proposals", step, at + 3, at + 3.5))
        found["target"].append(span("verify", step, at + 4, at + 9.9))
        found["target"].append(span("send outcome", step, at + 10, at + 10.2))
    return found


def test_a_round_goes_from_outcome_to_outcome() -> None:
    found = rounds(by_step(processes()))
    assert len(found) == 4, "the first has no outcome before it"
    assert medians(found) == RoundTimes(10.0, 1.0, 2.0, 1.0, 6.0)
    assert all(sum(each[1:]) == pytest.approx(each.total) for each in found)


def test_messages_are_counted_by_step() -> None:
    counts = message_counts(by_step(processes()))
    assert counts == {"draft: send proposals": 1.0, "target: send outcome": 1.0}


def test_a_message_is_an_arrow_between_two_processes() -> None:
    events = chrome_trace(processes())["traceEvents"]
    begins = [each for each in events if each["ph"] == "s"]
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert len(begins) == 5 + 4, "proposals of each step, outcomes of all but the last"
    for each in begins:
        assert ends[each["id"]]["pid"] != each["pid"] and ends[each["id"]]["ts"] > each["ts"]
    json.dumps(events)


class Worker:
    def verify(self, plan: object) -> str:
        return f"verdict of {plan}"


class Plan:
    step = 3


def test_only_a_traced_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, plan = Worker(), Plan()
    for folder in (None, tmp_path):
        if folder is not None:
            monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        with traced("target", lambda: [TracedMethod(worker, "verify", "verify")]):
            assert worker.verify(plan).startswith("verdict")
    assert [each.step for each in read_spans(tmp_path, 10)["target"]] == [3]


def test_the_last_steps_that_all_took_part_in_are_kept(tmp_path: Path) -> None:
    for process, steps in (("target", range(1, 9)), ("draft", range(4, 8))):
        spans = [span("x", step, step, step + 0.5) for step in steps]
        (tmp_path / f"{process}.json").write_text(json.dumps({"process": process, "spans": spans}))
    found = read_spans(tmp_path, 2)
    assert {process: [each.step for each in spans] for process, spans in found.items()} == {
        "draft": [6, 7],
        "target": [6, 7],
    }
