"""What a server refuses before it starts anything."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import pytest

from outrider.cluster.events import Event
from outrider.cluster.serve import serve
from outrider.cluster.serve_callbacks import Addresses, ServeCallbacks
from outrider.cluster.signals import restore_signals
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.links.speculation import SpeculationStatus


def _say(event: Event) -> None:
    raise AssertionError(f"it has begun: {event.text}")


def _show(
    addresses: Addresses, speculation: SpeculationStatus | None, settled: EngineConfig
) -> None:
    raise AssertionError("it serves")


@pytest.mark.parametrize(
    ("settings", "secret", "sentence"),
    [
        ({"server.processes": 0}, "s", "server.processes is 0 but cluster.listen is not set"),
        ({"cluster.listen": "127.0.0.1:0"}, "", "OUTRIDER_SECRET is not set; set it to the same"),
        ({"cluster.listen": "50060"}, "s", "cluster.listen is '50060'; it must be a host and a"),
        ({"cluster.listen": "192.0.2.1:1"}, "s", r"cannot listen on tcp:192.0.2.1:1: .*"),
    ],
)
def test_a_server_that_nobody_could_reach_or_trust_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], secret: str, sentence: str
) -> None:
    monkeypatch.setenv("OUTRIDER_SECRET", secret)
    values = {"target.model": "t", "server.port": 0, "server.grpc_port": 0, **settings}
    with pytest.raises(ConfigError, match=sentence):
        serve(EngineConfig.from_settings(values), ServeCallbacks(_say, _show), use_ray=False)


def test_a_signal_that_a_library_has_taken_is_heard_again() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        # As a library does it: Python is not told.
        ctypes.CDLL(None).signal(signal.SIGTERM, int(signal.SIG_IGN))
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == []
        restore_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
