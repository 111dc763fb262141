"""Merges the spans of a traced run into a Chrome trace, and says where a round's time goes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from outrider.trace import TraceSpan


class Hop(NamedTuple):
    """A message: the span that sends it, and the span that waits for it or starts with it."""

    sender: tuple[str, str]  # process, name of the span
    receiver: tuple[str, str]
    steps_later: int = 0  # of the receiver's span


HOPS = (
    Hop(("engine", "send to draft"), ("draft", "draft")),
    Hop(("engine", "send to target"), ("target", "wait for proposals")),
    Hop(("target", "send outcome"), ("draft", "draft"), 1),
    Hop(("draft", "send proposals"), ("target", "verify")),
    Hop(("target", "send verdict"), ("engine", "apply")),
)
CRITICAL = HOPS[2:4]  # of a round, with drafting and verifying
_DRAFT, _VERIFY = ("draft", "draft"), ("target", "verify")


class RoundTimes(NamedTuple):
    """Where one round's time went, in ms: from an outcome to the next."""

    total: float
    outcome_hop: float
    draft: float
    proposals_hop: float
    verify: float


SpansByStep = Mapping[tuple[str, str], Mapping[int, TraceSpan]]
"""By process and name, then by step."""


def read_spans(folder: Path, last: int) -> dict[str, list[TraceSpan]]:
    """The spans of each process, of the last steps that every process took part in."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        found[document["process"]] = [TraceSpan(*each) for each in document["spans"]]
    common = set.intersection(*({s.step for s in spans if s.step} for spans in found.values()))
    kept = set(sorted(each for each in common if each is not None)[-last:])
    return {
        process: [span for span in spans if span.step in kept] for process, spans in found.items()
    }


def by_step(processes: Mapping[str, Sequence[TraceSpan]]) -> SpansByStep:
    found: dict[tuple[str, str], dict[int, TraceSpan]] = {}
    for process, spans in processes.items():
        for span in spans:
            if span.step is not None:
                found.setdefault((process, span.name), {})[span.step] = span
    return found


def rounds(spans: SpansByStep) -> list[RoundTimes]:
    """The critical path of each round whose parts are all known."""
    outcomes, drafts = spans.get(CRITICAL[0].sender, {}), spans.get(_DRAFT, {})
    posts, passes = spans.get(CRITICAL[1].sender, {}), spans.get(_VERIFY, {})
    found = []
    for before, step in pairwise(sorted(passes)):
        parts = (outcomes.get(before), drafts.get(step), posts.get(step), outcomes.get(step))
        if step != before + 1 or any(part is None for part in parts):
            continue
        sent, draft, post, done = (part for part in parts if part is not None)
        verify = passes[step]
        marks = (
            (sent.begin_ns, done.begin_ns),
            (sent.begin_ns, draft.begin_ns),
            (draft.begin_ns, post.begin_ns),
            (post.begin_ns, verify.begin_ns),
            (verify.begin_ns, done.begin_ns),
        )
        found.append(RoundTimes(*((end - begin) / 1e6 for begin, end in marks)))
    return found


def message_counts(spans: SpansByStep) -> dict[str, float]:
    """Messages a step, by process and kind."""
    counts = Counter({key: len(each) for key, each in spans.items() if key[1].startswith("send")})
    num_steps = max(len(spans.get(_VERIFY, {})), 1)
    return {f"{process}: {name}": count / num_steps for (process, name), count in counts.items()}


def medians(found: Iterable[RoundTimes]) -> RoundTimes:
    return RoundTimes(*(median(each) for each in zip(*found, strict=True)))


def chrome_trace(processes: Mapping[str, Sequence[TraceSpan]]) -> dict[str, Any]:
    """In the format of chrome://tracing and Perfetto; arrows are messages."""
    events: list[dict[str, Any]] = []
    pids = {process: pid for pid, process in enumerate(processes, 1)}
    begin_ns = min((span.begin_ns for spans in processes.values() for span in spans), default=0)
    for process, spans in processes.items():
        events.append(_event("M", "process_name", pids[process], args={"name": process}))
        for span in spans:
            events.append(
                _event(
                    "X",
                    span.name,
                    pids[process],
                    ts=(span.begin_ns - begin_ns) / 1e3,
                    dur=(span.end_ns - span.begin_ns) / 1e3,
                    args={"step": span.step},
                )
            )
    return {"traceEvents": [*events, *_arrows(by_step(processes), pids, begin_ns)]}


def _arrows(spans: SpansByStep, pids: Mapping[str, int], begin_ns: int) -> list[dict[str, Any]]:
    events = []
    for hop in HOPS:
        receivers = spans.get(hop.receiver, {})
        for step, sent in spans.get(hop.sender, {}).items():
            received = receivers.get(step + hop.steps_later)
            if received is None:
                continue
            own = {"cat": "message", "id": f"{hop.sender} {step}"}
            for phase, (process, _), span in (
                ("s", hop.sender, sent),
                ("f", hop.receiver, received),
            ):
                at_us = (span.begin_ns - begin_ns) / 1e3
                binding = {"bp": "e"} if phase == "f" else {}
                events.append(
                    _event(phase, hop.sender[1], pids[process], ts=at_us, **own, **binding)
                )
    return events


def _event(phase: str, name: str, pid: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": pid, "tid": 0, **fields}
