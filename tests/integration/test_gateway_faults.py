"""Errors of our own that nobody expected: told in shape, counted, and logged once."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeService, fake_service
from metrics_tools import read_page

from outrider.errors import OutriderError
from outrider.gateway.preparation import Preparation

TIMES = 5


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    async def fail(*args: object, **options: object) -> None:
        raise TypeError("a fault of the tests")

    with fake_service(tmp_path) as running:
        monkeypatch.setattr(Preparation, "params", fail)
        monkeypatch.setattr(Preparation, "tokenize", fail)
        yield running


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_over_http(service: FakeService, caplog: pytest.LogCaptureFixture, path: str) -> None:
    line = http.client.HTTPConnection(service.server.http_address, timeout=60)
    try:
        line.connect()
        first = line.sock
        for _ in range(TIMES):
            line.request("POST", path, '{"prompt": "x"}', {"Content-Type": "application/json"})
            reply = line.getresponse()
            told = json.loads(reply.read())["error"]
            assert reply.status == 500 and "its log has the details" in told["message"]
            assert line.sock is first  # the connection stays
    finally:
        line.close()
    _check_told_once(service, caplog)


def test_over_grpc(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(TIMES):
        with pytest.raises(OutriderError, match="its log has the details"):
            service.client.generate([5, 6], max_tokens=1)
    _check_told_once(service, caplog)


def _check_told_once(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    page = read_page(service.server.http_address)
    assert page["outrider:internal_errors_total"] == TIMES
    assert sum(record.exc_info is not None for record in caplog.records) == 1
