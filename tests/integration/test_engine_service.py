"""What gateways find at an engine's door when the engine is over."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from outrider.config import EngineConfig
from outrider.engine.build import build_engine
from outrider.engine.service import EngineService
from outrider.links.address import dial
from outrider.links.channel import Channel
from outrider.links.codec import GATEWAY_CODEC
from outrider.links.frames import LinkClosedError
from outrider.links.gateway_messages import EngineFacts
from outrider.links.handshake import greet
from outrider.links.listener import Listener
from outrider.links.rank_messages import Hello, Role

pytestmark = [pytest.mark.model]

MODEL = "smollm2-135m-draft"
SECRET = "a secret of the tests"
TIMEOUT_S = 60.0


def _dial_as_gateway(address: str) -> Channel:
    sock = dial(address, TIMEOUT_S)
    greet(sock, SECRET, Hello(Role.GATEWAY, 0, 1, os.getpid(), socket.gethostname()), TIMEOUT_S)
    return Channel(sock, GATEWAY_CODEC, peer="the engine")


def test_an_engine_that_is_over_takes_no_gateway_though_its_door_is_open(tmp_path: Path) -> None:
    config = EngineConfig.from_kwargs(model=MODEL, kv_cache_gb=0.05, max_model_len=256)
    listener = Listener([f"unix:{tmp_path}/engine.sock"], SECRET, {})
    engine = build_engine(config)
    service = EngineService(engine, listener)
    try:
        with _dial_as_gateway(listener.addresses[0]) as before:
            assert isinstance(before.receive(TIMEOUT_S), EngineFacts)
            service.close()
            with pytest.raises(LinkClosedError):
                before.receive(TIMEOUT_S)
        # As a gateway does that looks for the next engine faster than this one closes its door.
        with _dial_as_gateway(listener.addresses[0]) as after, pytest.raises(LinkClosedError):
            after.receive(TIMEOUT_S)
    finally:
        listener.close()
        engine.close()
