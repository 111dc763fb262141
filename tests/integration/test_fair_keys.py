"""Keys that share one real engine: what one of them asks for does not keep another from it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from keyed_server import server_with_keys
from waits import wait_until

from outrider.api_types.errors import UnavailableError
from outrider.client import Client, Stream
from outrider.errors import CapacityError

pytestmark = [pytest.mark.model]

SEATS, MAX_WAITING = 2, 6


def outcome(stream: Stream) -> str:
    try:
        return f"{stream.result().usage.completion_tokens} tokens"
    except (CapacityError, UnavailableError) as error:
        return "refused" if "max_waiting" in str(error) else repr(error)


def test_a_key_that_fills_rows_and_queue_does_not_starve_another(tmp_path: Path) -> None:
    settings = {"scheduler.max_num_seqs": SEATS, "scheduler.max_waiting": MAX_WAITING}
    with (
        server_with_keys(tmp_path, {"greedy": "", "modest": ""}, settings) as server,
        Client(server.grpc_address, api_key="greedy") as greedy,
        Client(server.grpc_address, api_key="modest") as modest,
        contextlib.ExitStack() as streams,
    ):
        greedy.wait_ready(60)
        many = [
            streams.enter_context(greedy.stream([7, number], max_tokens=200, ignore_eos=True))
            for number in range(SEATS + MAX_WAITING)
        ]

        def is_full() -> bool:
            engine = greedy.status().engine
            return engine is not None and engine.waiting == MAX_WAITING

        wait_until(is_full)
        assert modest.generate([9, 9], max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        outcomes = [outcome(stream) for stream in many]
    assert outcomes.count("refused") == 1
    assert outcomes.count("200 tokens") == SEATS + MAX_WAITING - 1
