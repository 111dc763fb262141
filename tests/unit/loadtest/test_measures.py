"""Figures of requests that were written by hand, against sums done by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from load_records import answered, failed, shift, speculated, write_run

from outrider.errors import ConfigError, OutriderError
from outrider.loadtest.records import CountedBy, RequestRecord, ShiftPhase
from outrider.loadtest.results import tallies
from outrider.loadtest.results.analysis import Analysis, analyse, shifts_of
from outrider.loadtest.results.measures import Measures, Slo, Spread
from outrider.loadtest.results.tallies import Histogram
from outrider.loadtest.runs import ServerSample, ShiftRecord


def of(records: list[RequestRecord], *shifts: ShiftRecord, slo: Slo | None = None) -> Measures:
    return Analysis(records, list(shifts) or [shift()], slo=slo).of("off", "rate 2")


def p50(spread: Spread | None) -> float:
    assert spread is not None
    return spread.p50


def test_latency_counts_from_the_intended_time() -> None:
    found = of([answered(intended_s=1.0, lag_s=2.0, update_s=(0.1, 0.5), update_tokens=(1, 4))])
    assert p50(found.ttft) == pytest.approx(2100)
    assert p50(found.ttft_from_send) == pytest.approx(100)
    assert p50(found.e2e) == pytest.approx(2500)


def test_time_per_token_leaves_out_the_tokens_of_the_first_update() -> None:
    found = of([answered(update_s=(0.1, 0.5), update_tokens=(3, 4))])
    assert p50(found.tpot) == pytest.approx(100)


def test_an_answer_in_one_update_has_no_time_per_token() -> None:
    found = of([answered(update_s=(0.1,), update_tokens=(5,))])
    assert (found.tpot, found.gap, found.itl) == (None, None, None)
    assert found.tokens_per_update == Spread(5, 5, 5, 5, 5, 5, 1)


def test_a_gap_is_shared_by_the_tokens_it_ends_with() -> None:
    found = of([answered(update_s=(0.1, 0.3, 0.4), update_tokens=(1, 4, 1))])
    assert found.gap is not None and found.itl is not None
    assert found.gap.mean == pytest.approx(150)
    assert found.gap.n == 2 and found.itl.n == 5
    assert found.itl.mean == pytest.approx(60)  # 4 x 50 and 1 x 100
    assert found.itl.p50 == pytest.approx(50, rel=0.005)
    assert found.updates_by_tokens == {1: 2, 4: 1}


def test_only_tokens_inside_the_window_count_whatever_the_phase() -> None:
    early = answered(
        intended_s=-1, update_s=(0.5, 1.5), update_tokens=(7, 2), phase=ShiftPhase.WARM_UP
    )
    late = answered(intended_s=9.5, update_s=(0.4, 0.5, 2), update_tokens=(3, 11, 13))
    found = of([early, late])
    assert found.output_tokens_s == pytest.approx((2 + 3) / 10)
    assert found.requests_s == pytest.approx(1 / 10)  # the early one ended at 0.5
    assert found.sent == 1
    assert found.offered_s == pytest.approx(1 / 10)


def test_a_sum_of_tokens_is_spread_evenly_over_updates() -> None:
    found = of(
        [answered(intended_s=9, update_s=(0.2, 0.8, 1.1), update_tokens=(), output_tokens=9)]
    )
    assert found.output_tokens_s == pytest.approx(6 / 10)
    assert p50(found.tpot) == pytest.approx(900 / 6)


def test_discarded_requests_and_shifts_count_nowhere() -> None:
    found = of(
        [answered(phase=ShiftPhase.DISCARDED), answered(intended_s=21)],
        shift(is_discarded=True),
        shift(measured_from_s=20, measured_to_s=30, end_s=30),
    )
    assert (found.sent, found.seconds) == (1, 10)
    assert found.output_tokens_s == pytest.approx(0.3)


def test_the_books_balance() -> None:
    records = [answered(), failed("http 429"), failed("http 429"), failed("reset"), failed(None)]
    found = of([*records, failed("reset", phase=ShiftPhase.COOL_DOWN)])
    assert (found.sent, found.ok, found.failed, found.timed_out) == (5, 1, 3, 1)
    assert found.errors == {"http 429": 2, "reset": 1}
    with pytest.raises(OutriderError, match=r"5 sent, 1 ok, 0 errors, 3 timed out"):
        Measures(arm="off", cell="rate 2", seconds=1, sent=5, ok=1, timed_out=3)


def test_goodput_counts_failures_as_misses() -> None:
    quick = answered(update_s=(0.1, 0.2), update_tokens=(1, 1))
    slow = answered(update_s=(0.6, 0.7), update_tokens=(1, 1))
    found = of([quick, slow, failed("reset"), failed(None)], slo=Slo.parse("ttft=500ms,e2e=2s"))
    assert found.goodput is not None
    assert (found.goodput.met, found.goodput.share) == (1, 0.25)
    assert found.goodput.requests_s == pytest.approx(0.1)


def test_one_update_keeps_to_any_time_per_token_and_no_token_to_no_first() -> None:
    whole = answered(update_s=(0.1,), update_tokens=(5,))
    empty = answered(update_s=(), update_tokens=())
    good = of([whole], slo=Slo.parse("tpot=1ms")).goodput
    bad = of([empty], slo=Slo.parse("ttft=9s")).goodput
    assert good is not None and good.share == 1
    assert bad is not None and bad.share == 0


def test_an_slo_is_read_with_units() -> None:
    slo = Slo.parse("ttft=500ms, tpot=.05s,e2e=10s")
    assert slo == Slo(500, 50, 10_000)
    assert str(slo) == "ttft=500ms,tpot=50ms,e2e=10000ms"


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=5m", "p99=5ms", "e2e=1s,e2e=2s"])
def test_an_slo_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slo"):
        Slo.parse(text)


def test_acceptance_by_position() -> None:
    found = of(
        [
            answered(speculated=speculated(4, 3, 1, depth=2), output_tokens=13),
            answered(speculated=speculated(0, 0, 2, depth=2), output_tokens=6),
        ]
    ).speculation
    assert found is not None
    assert found.acceptance == pytest.approx(9 / 20)
    assert found.tokens_a_round == pytest.approx(19 / 10)
    assert found.depth == 2
    assert found.survival == pytest.approx((6 / 10, 3 / 10))
    assert found.hazard == pytest.approx((6 / 10, 3 / 6))


def test_a_server_that_tells_no_rounds_has_no_acceptance() -> None:
    assert of([answered()]).speculation is None


def test_cached_prompts_and_who_counted_are_told() -> None:
    found = of(
        [
            answered(prompt_tokens=100, cached_tokens=80),
            answered(prompt_tokens=60, cached_tokens=0, counted_by=CountedBy.TOKENISER),
            answered(prompt_tokens=40),
        ]
    )
    assert found.cached_share == pytest.approx(80 / 160)
    assert found.counted_by == {"ids": 2, "tokeniser": 1}


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    records = [
        answered(category="code", prompt_tokens=10, block=0),
        answered(category="text", prompt_tokens=100, block=1, intended_s=11.0),
        answered(category="text", block=1, intended_s=12.0),
    ]
    windows = [shift(), shift(block=1, measured_from_s=10, measured_to_s=20, end_s=20)]
    analysis = analyse(write_run(tmp_path, records, windows))
    whole = analysis.of("off", "rate 2")
    categories = analysis.by_category("off", "rate 2")
    lengths = analysis.by_length("off", "rate 2")
    assert {name: each.sent for name, each in categories.items()} == {"code": 1, "text": 2}
    assert list(lengths) == ["up to 64", "65 to 256", "unknown"]
    assert [each.sent for each in analysis.blocks("off", "rate 2")] == [1, 2]
    for parts in (categories, lengths):
        assert sum(each.output_tokens_s or 0 for each in parts.values()) == pytest.approx(
            whole.output_tokens_s
        )
    assert whole.output_tokens_s == pytest.approx(9 / 20)
    assert whole.gap is not None and whole.gap.n == 6


def test_a_cell_where_an_arm_did_not_run_is_empty_and_an_unknown_name_is_an_error() -> None:
    records = [answered(), answered(arm="d2", cell="rate 4")]
    analysis = Analysis(records, shifts_of(records))
    assert analysis.arms == ["off", "d2"]
    assert [(cell.kind, cell.value) for cell in analysis.cells] == [("rate", 2), ("rate", 4)]
    assert analysis.of("d2", "rate 2").sent == 0
    assert analysis.blocks("d2", "rate 2") == []
    with pytest.raises(OutriderError, match="arm 'd3' is unknown; this run has off, d2"):
        analysis.of("d3", "rate 2")
    with pytest.raises(OutriderError, match="cell 'rate 8'"):
        analysis.of("d2", "rate 8")


def test_a_window_is_found_where_no_shift_was_written() -> None:
    records = [answered(intended_s=at) for at in (1.0, 2.0, 5.0)]
    warm = answered(intended_s=0.0, phase=ShiftPhase.WARM_UP)
    (found,) = shifts_of([warm, *records])
    assert (found.start_s, found.measured_from_s, found.measured_to_s) == (0, 1, 5)
    assert found.end_s == pytest.approx(5.3)


def test_a_series_tells_each_second() -> None:
    records = [
        answered(intended_s=0.2, update_s=(0.1, 2.0), update_tokens=(1, 4)),
        answered(intended_s=0.4, update_s=(0.3, 0.4), update_tokens=(2, 1)),
    ]
    samples = [
        ServerSample(
            at, "s", "off", running=running, rounds=rounds, drafted=2 * rounds, accepted=rounds
        )
        for at, running, rounds in ((0.5, 2, 10), (1.5, 1, 30), (2.5, 0, 30))
    ]
    window = shift(measured_from_s=1, measured_to_s=3, end_s=3)
    found = Analysis(records, [window], samples).series("off", "rate 2")
    assert found.at_s.tolist() == [0, 1, 2]
    assert found.is_measured.tolist() == [False, True, True]
    assert found.tokens_s.tolist() == [4, 0, 4]
    assert found.ttft_p50_ms[0] == pytest.approx(200)
    assert found.in_flight.tolist() == [2, 1, 0]
    assert found.running.tolist() == [2, 1, 0]
    np.testing.assert_equal(found.acceptance, [np.nan, 0.5, np.nan])
    np.testing.assert_equal(found.depth, [np.nan, 2, np.nan])


def test_without_samples_a_series_takes_acceptance_from_the_answers() -> None:
    record = answered(intended_s=0.0, speculated=speculated(1, 1, depth=2))
    found = Analysis([record], [shift(end_s=2)]).series("off", "rate 2")
    np.testing.assert_equal(found.acceptance, [0.25, np.nan])
    assert np.isnan(found.running).all()


def test_a_histogram_is_within_half_a_per_cent() -> None:
    values = np.random.default_rng(1).lognormal(3, 2, 5000)
    histogram = Histogram()
    histogram.add(values, Histogram.bins(values))
    found, exact = histogram.spread(), Spread.of(values)
    assert found is not None and exact is not None
    assert found.p50 == pytest.approx(exact.p50, rel=0.006)
    assert found.p99 == pytest.approx(exact.p99, rel=0.006)
    assert found.mean == pytest.approx(exact.mean)
    assert found.max == exact.max


def test_updates_that_came_at_once_have_no_gap() -> None:
    found = of([answered(update_s=(0.1, 0.1), update_tokens=(1, 1))]).gap
    assert found == Spread(0, 0, 0, 0, 0, 0, 1)


def test_updates_are_counted_alike_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        answered(
            intended_s=0.5 * number,
            update_s=tuple(0.1 * step for step in range(1, 2 + number)),
            update_tokens=(1 + number % 3,) * (1 + number),
            category=f"c{number % 2}",
        )
        for number in range(12)
    ]
    windows = [shift()]
    at_once = Analysis(records, windows)
    monkeypatch.setattr(tallies, "PENDING", 5)
    bit_by_bit = Analysis(records, windows)
    whole = at_once.of("off", "rate 2")
    again = bit_by_bit.of("off", "rate 2")
    assert whole.gap is not None and again.gap is not None
    assert whole.gap.n == again.gap.n == sum(range(12))
    assert whole.gap.mean == pytest.approx(again.gap.mean)
    assert whole.updates_by_tokens == again.updates_by_tokens
    assert sum(whole.updates_by_tokens.values()) == sum(range(1, 13))
    series = [each.series("off", "rate 2").tokens_s for each in (at_once, bit_by_bit)]
    assert series[0].tolist() == series[1].tolist()


def arrived(rate: float, takes_s: float, seconds: float, capacity: float | None = None) -> Measures:
    """Regular arrivals, which a server with a capacity answers one after the other."""
    records, free_s = [], 0.0
    for number in range(int(rate * seconds)):
        at_s = number / rate
        ends_s = at_s + takes_s
        if capacity is not None:
            free_s = max(free_s, at_s) + 1 / capacity
            ends_s = max(ends_s, free_s)
        phase = ShiftPhase.WARM_UP if at_s < 3 else ShiftPhase.MEASURED
        taken = (ends_s - at_s,)
        records.append(answered(intended_s=at_s, update_s=taken, update_tokens=(1,), phase=phase))
    return of(records, shift(measured_from_s=3, measured_to_s=seconds, end_s=seconds))


def test_few_requests_under_way_at_the_end_of_a_short_window_are_no_overload() -> None:
    window = shift(measured_to_s=5)
    quick = [answered(intended_s=at, update_s=(0.4,), update_tokens=(1,)) for at in (1, 2, 3, 4)]
    late = answered(intended_s=4.9, update_s=(0.4,), update_tokens=(1,))
    found = of([*quick, late], window)
    assert (found.open_at_start, found.open_at_end) == (0, 1)
    assert found.requests_s == pytest.approx(0.8 * (found.offered_s or 0))
    assert found.kept_up
    assert arrived(rate=2, takes_s=2.5, seconds=13).kept_up


def test_a_queue_that_grows_is_an_overload_however_short_the_window() -> None:
    assert arrived(rate=4, takes_s=0.5, seconds=13, capacity=5).kept_up
    assert not arrived(rate=4, takes_s=0.5, seconds=13, capacity=2).kept_up
    assert not arrived(rate=8, takes_s=0.5, seconds=60, capacity=7.4).kept_up


def test_requests_that_fail_are_not_kept_up_with() -> None:
    good = [answered(intended_s=0.1 * number) for number in range(36)]
    bad = [failed("http 429", intended_s=4.0) for _ in range(4)]
    assert not of([*good, *bad]).kept_up
