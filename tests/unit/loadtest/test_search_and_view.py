"""Looking for a load, and what is seen while a run runs."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from outrider.errors import ConfigError
from outrider.loadtest.clients.process import RecordBatch, RequestSummary
from outrider.loadtest.clients.shifts import LoadSpec
from outrider.loadtest.dashboard import PlainView, TerminalView, View, make_view
from outrider.loadtest.loads import (
    ConcatenatedPrompts,
    PromptSets,
    closed_loads,
    open_loads,
    read_texts,
    spread,
    trace_loads,
)
from outrider.loadtest.plan import ArmSpec
from outrider.loadtest.requests import Prompt
from outrider.loadtest.results.measures import Slo
from outrider.loadtest.runs import ShiftRecord
from outrider.loadtest.search import (
    MAX_STEPS,
    RESOLUTION,
    Search,
    SearchResult,
    knee,
    largest_good,
)
from outrider.loadtest.servers.server import ServerSpec
from outrider.loadtest.targets.base import TargetSpec


def found(low: float, high: float, limit: float) -> SearchResult:
    async def measure(load: float) -> float:
        return 1.0 if load <= limit else 0.5

    return asyncio.run(largest_good("a", low, high, measure))


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 50), st.floats(1.2, 1e4), st.floats(0, 1))
def test_the_largest_good_load_is_known_to_within_the_resolution(
    low: float, factor: float, place: float
) -> None:
    high, limit = low * factor, low * factor**place
    finding = found(low, high, limit)
    assert finding.value is not None and len(finding.tried) <= MAX_STEPS
    assert finding.value <= limit or finding.value == pytest.approx(limit)
    assert finding.is_bound or limit <= finding.value * RESOLUTION * 1.001


def test_a_search_says_when_all_or_nothing_was_good() -> None:
    assert found(1, 16, 0.5).sentence == "a: not even 1 requests a second meet the SLO."
    assert found(1, 16, 20).sentence.startswith("a: 16 requests a second, the highest tried")
    assert found(1, 16, 4).sentence == "a: up to 4 requests a second meet the SLO."
    with pytest.raises(ConfigError, match="the lower first"):
        found(4, 4, 1)


@pytest.mark.parametrize("at", [2, 8, 100])
def test_the_knee_is_where_doubling_stops_to_pay(at: int) -> None:
    async def measure(clients: float) -> float:
        return 10.0 * min(clients, at)

    finding = asyncio.run(knee("a", 1, measure))
    assert finding.value is not None and at <= finding.value < 2.2 * at
    assert not finding.is_bound and "stops growing" in finding.sentence


def test_throughput_without_end_is_told_as_a_bound() -> None:
    async def measure(clients: float) -> float:
        return clients

    finding = asyncio.run(knee("a", 1000, measure))
    assert finding.is_bound and "still grew" in finding.sentence


def test_a_search_needs_what_it_looks_for() -> None:
    assert Search.parse("slo", Slo.parse("ttft=1s")).kind == "slo"
    for text in ("slo", "other"):
        with pytest.raises(ConfigError, match="--find"):
            Search.parse(text, None)


# -- loads ----------------------------------------------------------------------------------------


def test_each_load_is_spread_over_texts_and_temperatures() -> None:
    texts = PromptSets([], {"one": (0, 3), "two": (3, 5)})
    loads = spread(open_loads([1, 2], "poisson", 10), texts, [0, 0.7], 0.5)
    assert [load.name for load in loads][:3] == [
        "rate 1, one, T 0", "rate 2, one, T 0", "rate 1, one, T 0.7",
    ]  # fmt: skip
    assert len({load.name for load in loads}) == 8
    assert {load.prompt_range for load in loads if load.text == "two"} == {(3, 5)}
    [plain] = spread(closed_loads([4], 0), PromptSets([], {"one": (0, 3)}), [0], 0)
    assert (plain.name, plain.text, plain.clients) == ("clients 4", "", 4)
    [ramp] = open_loads([], "ramp:1-3", 10)
    assert ramp.name == "ramp:1-3" and ramp.value == pytest.approx(2)
    with pytest.raises(ConfigError, match="--clients is 0"):
        closed_loads([0], 0)


def test_sets_are_one_pool_and_a_trace_has_a_part_for_each_speed() -> None:
    texts = read_texts(
        ["mt-bench", "vicuna"], tokenizer=None, limit=8, max_prompt_tokens=None, seed=0
    )
    assert list(texts.prompt_range.values()) == [(0, 8), (8, 16)] and len(texts.pool) == 16
    traced, loads = trace_loads(
        "azure-conv", [0.5, 1], duration_s=20, length_scale=0.1, tokenizer=None,
        max_prompt_tokens=None, seed=0,
    )  # fmt: skip
    (a, b), (c, d) = (load.prompt_range for load in loads)
    assert a == 0 and b == c and d == len(traced.pool)
    assert traced.pool[b - 1].id and traced.pool[d - 1].id


def test_joined_parts_are_one_sequence() -> None:
    made = [[Prompt(f"{part}/{n}", "c", text="t") for n in range(size)] for part, size in
            enumerate((2, 0, 3))]  # fmt: skip
    joined = ConcatenatedPrompts(made)
    assert [joined[n].id for n in range(len(joined))] == ["0/0", "0/1", "2/0", "2/1", "2/2"]
    assert joined[-1].id == "2/2"
    with pytest.raises(IndexError):
        joined[5]


# -- views ----------------------------------------------------------------------------------------

ARM = ArmSpec("deep [bold]", ServerSpec("s", "http://h:1"), TargetSpec(""))
LOAD = LoadSpec("rate 2", "rate", 2)


def _shown(view: View, console: Console, *, is_discarded: bool = False) -> str:
    good = RequestSummary(1.0, True, None, 0.25, 40)
    bad = RequestSummary(1.0, False, "http 429", None, 0)
    with view:
        view.say("starting [x]")
        view.shift_begins(ARM, LOAD, 0)
        view.ended(0, RecordBatch([], [good, good, bad], 4, 1))
        view.ended(1, RecordBatch([], [], 3, 2))
        view.shift_ends(
            ShiftRecord(ARM.name, LOAD.name, 0, 0, 0, 1, 1, is_discarded=is_discarded,
                        is_client_bound=True, loop_delay_p99_ms=70.0)
        )  # fmt: skip
    return console.export_text()


def test_the_plain_view_has_a_line_for_every_shift() -> None:
    console = Console(record=True, width=400, force_terminal=False)
    view = make_view(1, console)
    assert isinstance(view, PlainView)
    starting, line = _shown(view, console).splitlines()
    assert starting == "starting [x]"
    assert line.startswith("deep [bold], rate 2, block 1: sent 7, ok 2, failed 1 (http 429), ")
    assert "in flight 3" in line and "first token p50 250 ms" in line
    assert line.endswith("THE CLIENT WAS THE BOTTLENECK")


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_view_fits_its_width(width: int) -> None:
    console = Console(record=True, width=width, force_terminal=True)
    view = make_view(2, console)
    assert isinstance(view, TerminalView)
    text = _shown(view, console, is_discarded=True)
    assert "deep" in text and "starting [x]" in text
    assert "1 of 3" in " ".join(text.split())
    with console.capture() as captured:
        console.print(view._draw())
    lines = Text.from_ansi(captured.get()).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 8  # a row stays a row or little more
    assert "70 ms late, again" in " ".join(text.split()) or width == 80
