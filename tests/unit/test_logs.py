"""Log lines: who wrote them, about which request, and where they go."""

import json
import logging
import os
import re
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import typer

from outrider.errors import ConfigError
from outrider.log_stream import DroppingStream
from outrider.logs import LAST_LINES, last_lines, request_context, setup_logging

LOG = logging.getLogger("outrider.some.part")


def test_a_line_holds_time_level_role_rank_request_logger_and_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("info", role="target", rank=3)
    with request_context("r7"):
        LOG.info("took %d tokens", 5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO +target/3 r7 "
        r"outrider\.some\.part: took 5 tokens\n",
        captured.err,
    )


def test_outside_a_request_the_id_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    with request_context("r7"):
        pass
    LOG.info("idle")
    assert " engine/0 - outrider.some.part: idle\n" in capsys.readouterr().err


def test_request_contexts_nest(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    with request_context("outer"):
        with request_context("inner"):
            LOG.info("one")
        LOG.info("two")
    first, second = capsys.readouterr().err.splitlines()
    assert " inner " in first and " outer " in second


def test_the_request_of_one_thread_is_not_that_of_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging()
    with request_context("mine"):
        other = threading.Thread(target=LOG.info, args=("theirs",))
        other.start()
        other.join()
    assert " engine/0 - " in capsys.readouterr().err


def test_messages_under_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning")
    LOG.info("quiet")
    LOG.warning("loud")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_setting_up_again_replaces_and_does_not_double(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("error")
    setup_logging("info", role="draft")
    LOG.info("once")
    assert capsys.readouterr().err.count("draft/0") == 1


def test_only_our_own_logger_is_touched() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    setup_logging("debug")
    assert (root.handlers, root.level) == before


def test_json_lines_carry_the_same_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", role="draft", rank=1, json_lines=True)
    with request_context("r7"):
        LOG.warning("größer\nals %s", "gedacht")
    LOG.info("idle")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "role": "draft",
        "rank": 1,
        "request_id": "r7",
        "logger": "outrider.some.part",
        "message": "größer\nals gedacht",
    }
    assert second["request_id"] is None


def test_lines_stay_json_where_a_later_call_does_not_say_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("info", json_lines=True)
    setup_logging("warning", role="gateway")
    LOG.warning("still")
    assert json.loads(capsys.readouterr().err)["role"] == "gateway"
    setup_logging("info", json_lines=False)
    setup_logging("info")
    LOG.info("words")
    assert capsys.readouterr().err.endswith(" outrider.some.part: words\n")


def test_fields_of_a_record_are_fields_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", role="gateway", json_lines=True)
    LOG.info("a=1", extra={"fields": {"a": 1, "level": "not this"}})
    line = json.loads(capsys.readouterr().err)
    assert (line["a"], line["level"], line["message"]) == (1, "info", "a=1")


def test_json_lines_keep_an_exception_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(json_lines=True)
    try:
        raise ValueError("broken")
    except ValueError:
        LOG.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: broken")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^log_level is 'loud'; it must be one of debug, info, warning, error\.$",
    ):
        setup_logging("loud")


def test_only_the_last_lines_a_process_wrote_itself_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    before = "of an earlier process\n"
    path.write_text(before + "".join(f"line {i}\n" for i in range(LAST_LINES + 5)))
    lines = last_lines(path, len(before))
    assert lines == [f"line {i}" for i in range(5, LAST_LINES + 5)]
    path.write_text(before + "its only line\n")
    assert last_lines(path, len(before)) == ["its only line"]


def test_a_log_that_is_gone_is_told() -> None:
    assert last_lines("/no/such/log") == ["/no/such/log cannot be read: No such file or directory"]


def test_commands_write_their_errors_to_a_guarded_stream() -> None:
    """click asks a stream whether it is binary by writing no bytes to it."""
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w") as pipe:
        stream = DroppingStream(pipe)
        with mock.patch.object(sys, "stderr", stream):
            typer.echo("error: a sentence", err=True)
        stream.drain(60)
        assert os.read(reader.fileno(), 100) == b"error: a sentence\n"
