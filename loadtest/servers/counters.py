"""Reads a server's counters, from Outrider's status or from Prometheus metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.loadtest.records import MAX_VALUE, RequestSpeculation
from outrider.loadtest.runs import ServerSample

if TYPE_CHECKING:
    from outrider.api_types.results import ServerStatus

_LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)')
# Possessive quantifiers and \b avoid quadratic backtracking on a hostile page.
_LABEL = re.compile(r'\b([a-zA-Z_]\w*+)\s*+=\s*+"((?:\\.|[^"\\])*+)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos"
_MAX_POSITIONS = 1024  # drafts of a round


@dataclass(frozen=True, slots=True)
class PrometheusSample:
    """One sample line of the Prometheus text format."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_prometheus(text: str) -> Iterator[PrometheusSample]:
    """The samples of a page; skips lines without a finite number."""
    for line in text.splitlines():
        if line.startswith("#") or (found := _LINE.match(line)) is None:
            continue
        name, labels, number = found.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if abs(value) < MAX_VALUE:  # false for NaN, too
            yield PrometheusSample(
                name, {key: _plain(raw) for key, raw in _LABEL.findall(labels or "")}, value
            )


def _plain(raw: str) -> str:
    return re.sub(r'\\[n"\\]', lambda found: _ESCAPES[found[0]], raw)


def _both(name: str) -> tuple[str, str]:
    """Outrider's and vLLM's name of a metric; a server that exports both exports equal values."""
    return f"outrider:{name}", f"vllm:{name}"


# By field of `ServerSample`; the first name a server exports is used. Values of a name are summed
# over the processes or engines of a server.
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


def put_metrics(sample: ServerSample, text: str) -> None:
    """Fills in the metrics of an Outrider, vLLM, SGLang or llama.cpp server."""
    points: dict[str, list[PrometheusSample]] = {}
    for point in read_prometheus(text):
        points.setdefault(point.name.removesuffix("_total"), []).append(point)
    for field, names in _NAMES.items():
        values = next((points[name] for name in names if name in points), None)
        if values is not None:
            setattr(sample, field, _counted(sum(point.value for point in values)))
    if lengths := points.get(_ACCEPT_LENGTH):
        sample.accept_length = sum(point.value for point in lengths) / len(lengths)
    positions = next((points[name] for name in _both(_POSITIONS) if name in points), None)
    if positions is not None:
        sample.accepted_by_position = _by_position(positions)


def _by_position(points: Sequence[PrometheusSample]) -> list[int]:
    values = [
        (int(label), round(point.value))
        for point in points
        if (label := point.labels.get("position", "0")).isascii()
        and label.isdigit()
        and len(label) <= len(str(_MAX_POSITIONS))
        and int(label) < _MAX_POSITIONS
    ]
    counts = [0] * (max((position for position, _ in values), default=-1) + 1)
    for position, count in values:
        counts[position] += count
    return counts


def put_status(sample: ServerSample, status: ServerStatus) -> None:
    """Fills in the status of an Outrider server; nothing while it has no engine."""
    engine = status.engine
    if engine is None:
        return
    sample.running, sample.waiting = _counted(engine.running), _counted(engine.waiting)
    sample.steps, sample.committed = _counted(engine.steps), _counted(engine.committed_tokens)
    sample.drafted = _counted(engine.drafted_tokens)
    sample.accepted = _counted(engine.accepted_tokens)
    # Every round commits its accepted drafts and one token of the target's own.
    sample.rounds = _counted(engine.committed_tokens - engine.accepted_tokens)


def _counted(value: float) -> int | None:
    """None for a value too large for a count."""
    return round(value) if abs(value) < MAX_VALUE else None


def speculation_between(first: ServerSample, last: ServerSample) -> RequestSpeculation | None:
    """Speculation counts between two samples of a server.

    None if the server does not count drafts, or was restarted in between.
    """
    drafted, accepted = _grown(first, last, "drafted"), _grown(first, last, "accepted")
    if drafted is None or accepted is None:
        return None
    rounds = _grown(first, last, "rounds")
    if rounds is None:
        committed = _grown(first, last, "committed")
        rounds = max(0, committed - accepted) if committed is not None else 0
    return RequestSpeculation(rounds, drafted, accepted, _rounds_by_accepted(first, last, rounds))


def _grown(first: ServerSample, last: ServerSample, field: str) -> int | None:
    before, after = getattr(first, field), getattr(last, field)
    if before is None or after is None or after < before:
        return None
    return int(after - before)


def _rounds_by_accepted(first: ServerSample, last: ServerSample, rounds: int) -> list[int]:
    """Position j is accepted in exactly the rounds that accept more than j drafts."""
    if last.accepted_by_position is None:
        return []
    before = first.accepted_by_position or []
    before = before + [0] * (len(last.accepted_by_position) - len(before))
    at_least = [rounds, *(b - a for a, b in zip(before, last.accepted_by_position, strict=False))]
    exactly = [more - fewer for more, fewer in zip(at_least, [*at_least[1:], 0], strict=True)]
    return exactly if min(exactly) >= 0 else []
