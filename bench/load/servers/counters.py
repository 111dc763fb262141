"""Counters of a server, whatever it tells them by: our own status, or Prometheus' text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.bench.load.records import LARGEST, Speculated
from outrider.bench.load.runs import Sample

if TYPE_CHECKING:
    from outrider.gateway.results import ServerStatus

_LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)')
# Begins at a word and never gives back: a page must not take time by the square of its length.
_LABEL = re.compile(r'\b([a-zA-Z_]\w*+)\s*+=\s*+"((?:\\.|[^"\\])*+)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos"
_MAX_POSITIONS = 1024  # drafts of a round


@dataclass(frozen=True, slots=True)
class Point:
    """One line of Prometheus' text."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_prometheus(text: str) -> Iterator[Point]:
    """The values of a page; lines without a number that can be counted with are skipped."""
    for line in text.splitlines():
        if line.startswith("#") or (found := _LINE.match(line)) is None:
            continue
        name, labels, number = found.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if abs(value) < LARGEST:  # neither is what is no number
            yield Point(
                name, {key: _plain(raw) for key, raw in _LABEL.findall(labels or "")}, value
            )


def _plain(raw: str) -> str:
    return re.sub(r'\\[n"\\]', lambda found: _ESCAPES[found[0]], raw)


def _both(name: str) -> tuple[str, str]:
    """A metric of ours that has the name vLLM gave it; where both are told they are the same."""
    return f"outrider:{name}", f"vllm:{name}"


# By field of `Sample`; the first name that a server has counts. Several processes or engines of
# a server tell their own share each, so values of a name are added up.
_NAMES: Mapping[str, Sequence[str]] = {
    "running": (
        *(*_both("num_requests_running"), "sglang:num_running_reqs"),
        "llamacpp:requests_processing",
    ),
    "waiting": (
        *(*_both("num_requests_waiting"), "sglang:num_queue_reqs"),
        "llamacpp:requests_deferred",
    ),
    "committed": (
        *(*_both("generation_tokens"), "sglang:generation_tokens"),
        "llamacpp:tokens_predicted",
    ),
    "steps": ("outrider:engine_steps", "llamacpp:n_decode"),
    "rounds": (*_both("spec_decode_num_drafts"), "sglang:spec_verify_calls"),
    "drafted": (
        *(*_both("spec_decode_num_draft_tokens"), "llamacpp:draft_tokens"),
        "llamacpp:n_drafted",
    ),
    "accepted": (
        *(*_both("spec_decode_num_accepted_tokens"), "llamacpp:draft_tokens_accepted"),
        "llamacpp:n_drafted_accepted",
    ),
}
_ACCEPT_LENGTH = "sglang:spec_accept_length"


def put_metrics(sample: Sample, text: str) -> None:
    """Fill in what a page of Outrider, vLLM, SGLang or llama.cpp tells."""
    points: dict[str, list[Point]] = {}
    for point in read_prometheus(text):
        points.setdefault(point.name.removesuffix("_total"), []).append(point)
    for field, names in _NAMES.items():
        told = next((points[name] for name in names if name in points), None)
        if told is not None:
            setattr(sample, field, _counted(sum(point.value for point in told)))
    if lengths := points.get(_ACCEPT_LENGTH):
        sample.accept_length = sum(point.value for point in lengths) / len(lengths)
    positions = next((points[name] for name in _both(_POSITIONS) if name in points), None)
    if positions is not None:
        sample.accepted_by_position = _by_position(positions)


def _by_position(points: Sequence[Point]) -> list[int]:
    told = [
        (int(label), round(point.value))
        for point in points
        if (label := point.labels.get("position", "0")).isascii()
        and label.isdigit()
        and len(label) <= len(str(_MAX_POSITIONS))
        and int(label) < _MAX_POSITIONS
    ]
    counts = [0] * (max((position for position, _ in told), default=-1) + 1)
    for position, count in told:
        counts[position] += count
    return counts


def put_status(sample: Sample, status: ServerStatus) -> None:
    """Fill in what an Outrider server tells; nothing while it has no engine."""
    engine = status.engine
    if engine is None:
        return
    sample.running, sample.waiting = _counted(engine.running), _counted(engine.waiting)
    sample.steps, sample.committed = _counted(engine.steps), _counted(engine.committed_tokens)
    sample.drafted = _counted(engine.drafted_tokens)
    sample.accepted = _counted(engine.accepted_tokens)
    # Every round commits what it accepts and one token of the target's own.
    sample.rounds = _counted(engine.committed_tokens - engine.accepted_tokens)


def _counted(value: float) -> int | None:
    """None for what is beyond all counting."""
    return round(value) if abs(value) < LARGEST else None


def speculation_between(first: Sample, last: Sample) -> Speculated | None:
    """What speculation did from one sample of a server to a later one.

    None where the server does not count drafts, or was started anew between them.
    """
    drafted, accepted = _grown(first, last, "drafted"), _grown(first, last, "accepted")
    if drafted is None or accepted is None:
        return None
    rounds = _grown(first, last, "rounds")
    if rounds is None:
        committed = _grown(first, last, "committed")
        rounds = max(0, committed - accepted) if committed is not None else 0
    return Speculated(rounds, drafted, accepted, _rounds_by_accepted(first, last, rounds))


def _grown(first: Sample, last: Sample, field: str) -> int | None:
    before, after = getattr(first, field), getattr(last, field)
    if before is None or after is None or after < before:
        return None
    return int(after - before)


def _rounds_by_accepted(first: Sample, last: Sample, rounds: int) -> list[int]:
    """A position is accepted in just the rounds that accept at least so many."""
    if last.accepted_by_position is None:
        return []
    before = first.accepted_by_position or []
    before = before + [0] * (len(last.accepted_by_position) - len(before))
    at_least = [rounds, *(b - a for a, b in zip(before, last.accepted_by_position, strict=False))]
    exactly = [more - fewer for more, fewer in zip(at_least, [*at_least[1:], 0], strict=True)]
    return exactly if min(exactly) >= 0 else []
