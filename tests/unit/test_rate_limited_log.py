"""Lines that clients can cause are few, and say how many they stand for."""

from __future__ import annotations

import logging

import pytest

from outrider.rate_limited_log import MAX_KINDS, PERIOD_S, RateLimitedLog


class _Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def log(clock: _Clock) -> RateLimitedLog:
    return RateLimitedLog(logging.getLogger("test.quiet"), clock)


def test_one_line_a_minute_of_each_kind_with_a_count(
    log: RateLimitedLog, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        log.warning("no %s", number)
    log.warning("another")
    clock.now_s += PERIOD_S
    log.warning("no %s", "more")
    assert [record.getMessage() for record in caplog.records] == [
        "no 0",
        "another",
        "no more (and 99 more like it since the last line)",
    ]


def test_one_traceback_of_each_place(log: RateLimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    def fail(divisor: int) -> None:
        try:
            if divisor:
                raise ValueError(f"{divisor} is wrong")
            _ = 1 // divisor
        except (ValueError, ZeroDivisionError) as error:
            log.exception("it failed", error)

    for _ in range(10):
        fail(0)
        fail(1)
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        ZeroDivisionError,
        ValueError,
    ]


def test_the_kinds_it_remembers_are_bounded(log: RateLimitedLog) -> None:
    for number in range(2 * MAX_KINDS):
        log.warning(str(number))
    assert len(log._kinds) <= MAX_KINDS + 1


def test_more_kinds_than_it_remembers_share_one_count(
    log: RateLimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        for number in range(2 * MAX_KINDS):
            log.warning(str(number))
    assert len(caplog.records) == MAX_KINDS + 1


def test_the_first_lines_of_a_minute_are_written(
    clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = RateLimitedLog(logging.getLogger("test.quiet"), clock, burst=3)
    caplog.set_level(logging.INFO)
    for number in range(10):
        log.info("kind", "line %s", number, fields={"number": number})
    clock.now_s += PERIOD_S
    log.info("kind", "line %s", "later", fields={})
    assert [record.getMessage() for record in caplog.records] == [
        "line 0",
        "line 1",
        "line 2",
        "line later (and 7 more like it since the last line)",
    ]
    assert [vars(record)["fields"] for record in caplog.records[:2]] == [
        {"number": 0},
        {"number": 1},
    ]
