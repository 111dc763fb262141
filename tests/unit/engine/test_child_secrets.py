"""What an engine that is a child of a server is told of the server's secrets: nothing."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig
from outrider.engine.launch import child

KEY = "nobody-may-read-this"


def test_neither_the_file_nor_the_environment_has_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)
    monkeypatch.setenv("OUTRIDER_SERVER_API_KEY", KEY)
    config = EngineConfig.from_settings({"server.api_key": KEY, "server.max_requests": 7})
    text = child._file_text(config)
    assert KEY not in text and "max_requests: 7" in text
    assert KEY not in child.environment_without_settings().values()
