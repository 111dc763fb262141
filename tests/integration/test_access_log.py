"""The access log: one line a request, with how much and how long, and nothing of what was said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_engine import MODEL, FakeService, fake_service
from waits import wait_until

from outrider.errors import OutriderError
from outrider.gateway.metrics.access_log import MAX_REJECTIONS
from outrider.logs import setup_logging

ROOT = Path(__file__).resolve().parents[2]
SECRET_WORDS = "the quick brown fox"


def finished(service: FakeService) -> None:
    registry = service.server.gateway.metrics.registry
    wait_until(lambda: registry.get_sample_value("outrider:active_requests") == 0)


def lines_of(err: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in err.splitlines()]  # every line is an object
    return [each for each in found if each["logger"] == "outrider.access"]


def test_a_request_is_one_line_with_its_tokens_times_and_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("info", role="gateway", json_lines=True)
    with fake_service(tmp_path) as service:
        completion = service.client.generate(
            SECRET_WORDS, max_tokens=20, n=2, request_id="a-request"
        )
        finished(service)
    (line,) = lines_of(capsys.readouterr().err)
    assert (line["request_id"], line["protocol"], line["key"]) == ("a-request", "grpc", "")
    assert (line["model"], line["status"], line["reason"]) == (MODEL, "finished", "length")
    assert line["prompt_tokens"] == completion.usage.prompt_tokens
    assert line["cached_tokens"] == completion.usage.cached_tokens
    assert line["completion_tokens"] == 40
    told = completion.speculation
    assert (line["rounds"], line["drafted"]) == (told.rounds, told.drafted_tokens)
    assert line["accepted"] == told.accepted_tokens > 0
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"]
    assert line["resubmissions"] == 0
    assert "fox" not in json.dumps(line) and "prompt" not in line and "texts" not in line


def test_whatever_ends_a_request_is_in_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("info", role="gateway", json_lines=True)
    with fake_service(tmp_path, deaths=[30]) as service:
        service.client.generate([10], max_tokens=40)
        with service.client.stream([10], max_tokens=400) as stream:
            next(iter(stream))
        finished(service)
        with pytest.raises(OutriderError):
            service.client.generate([10], model="nobody")
        with pytest.raises(OutriderError):
            service.client.generate([10], max_tokens=5, request_id="odd id\nlevel=error")
        finished(service)
    resumed, aborted, unknown, odd = lines_of(capsys.readouterr().err)
    assert (resumed["reason"], resumed["resubmissions"]) == ("length", 1)
    assert (aborted["status"], aborted["reason"]) == ("finished", "abort")
    assert (unknown["status"], unknown["reason"]) == ("refused", "unknown_model")
    assert "prompt_tokens" not in unknown and unknown["total_s"] >= 0
    assert (odd["reason"], odd["request_id"]) == ("invalid", None), "unchecked, so it is not logged"


def test_prompts_and_texts_are_logged_only_if_the_server_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("info", role="gateway", json_lines=True)
    with fake_service(tmp_path, server={"log_prompts": True}) as service:
        completion = service.client.generate(SECRET_WORDS, max_tokens=8)
        finished(service)
    (line,) = lines_of(capsys.readouterr().err)
    assert line["prompt"] == SECRET_WORDS
    assert line["texts"] == [completion.text]
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text()))
    assert set(line) <= documented


def test_the_line_for_people_has_the_same_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("info", role="gateway")
    with fake_service(tmp_path) as service:
        service.client.generate([10, 11], max_tokens=6, request_id="r1")
        finished(service)
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "outrider.access" in each)
    assert " gateway/0 r1 outrider.access: protocol=grpc label=- key=- " in line
    assert " status=finished reason=length prompt_tokens=2 " in line
    assert " completion_tokens=6 " in line and " total_s=0." in line


def test_below_info_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning", role="gateway")
    with fake_service(tmp_path) as service:
        service.client.generate([10, 11], max_tokens=6)
        finished(service)
    assert "outrider.access" not in capsys.readouterr().err


def test_rejected_requests_cannot_fill_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("info", role="gateway", json_lines=True)
    with fake_service(tmp_path) as service:
        for _ in range(MAX_REJECTIONS + 20):
            with pytest.raises(OutriderError):
                service.client.generate([10], model="unknown")
        service.client.generate([10, 11], max_tokens=6)
        finished(service)
    statuses = [line["status"] for line in lines_of(capsys.readouterr().err)]
    assert statuses == ["refused"] * MAX_REJECTIONS + ["finished"]
