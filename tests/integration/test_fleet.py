"""Several gateway processes on the same ports: one is killed, all are told, all are stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import grpc
import pytest
from fleet_tools import Connection, RunningFleet, running_fleet
from process_tools import is_alive
from waits import wait_until

from outrider.api_types.errors import MARK
from outrider.proto import control_pb2

pytestmark = [pytest.mark.alone]

SIZE = 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), SIZE) as running:
        yield running


@contextmanager
def stream_on_each(fleet: RunningFleet) -> Iterator[dict[str, Connection]]:
    """Endless streams by request id, until every process has one; the kernel chooses whose each
    connection is."""
    found: dict[str, Connection] = {}
    try:
        for number in count():
            assert number < 60, "the processes do not share the connections"
            connection = found[f"r{number}"] = Connection(fleet.grpc_address)
            connection.stream(f"r{number}")
            assert connection.error is None
            time.sleep(0.05)
            if number % 4 == 3:
                wait_until(lambda: fleet.fleet.num_active == len(found))
                if all(each.num_active for each in fleet.fleet.registry.members.values()):
                    break
        yield found
    finally:
        for each in found.values():
            each.close()


def loaded_libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_gateways_load_neither_torch_nor_ray(fleet: RunningFleet) -> None:
    for index in range(SIZE):
        libraries = loaded_libraries(fleet.pid(index))
        assert "uvloop" in libraries
        assert "/torch/" not in libraries and "/ray/" not in libraries


def test_a_secret_is_on_no_command_line(fleet: RunningFleet) -> None:
    for index in range(SIZE):
        line = Path(f"/proc/{fleet.pid(index)}/cmdline").read_text()
        assert "--keeper" in line and fleet.fleet._secret not in line


def test_killing_one_of_three_pauses_no_stream_of_the_others(fleet: RunningFleet) -> None:
    with stream_on_each(fleet) as streams:
        killed, num_killed = fleet.pid(0), fleet.fleet.registry.members[0].num_active
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: sum(each.is_over for each in streams.values()) == num_killed)
        lost = [each for each in streams.values() if each.is_over]
        others = [each for each in streams.values() if not each.is_over]
        assert all(each.error.code() == grpc.StatusCode.UNAVAILABLE for each in lost if each.error)
        told = [len(each.arrivals) for each in others]
        newcomer = Connection(fleet.grpc_address)
        newcomer.stream(max_tokens=3)
        wait_until(lambda: newcomer.is_over)
        newcomer.close()
        assert newcomer.error is None
        # All of this before the killed one is back, so nobody has waited for it.
        wait_until(lambda: all(len(e.arrivals) > n + 5 for e, n in zip(others, told, strict=True)))
        assert not any("back after" in each.text for each in fleet.events)
        fleet.wait_said("gateway 0 was lost: its process ended with exit code -9")
        fleet.wait_said("gateway 0 back after")
        assert fleet.pid(0) != killed
        assert not any(each.is_over for each in others)
    fleet.call(fleet.fleet.wait_serving())
    with stream_on_each(fleet):  # which needs the new one to take connections
        pass


def test_a_request_is_ended_whichever_process_has_it(fleet: RunningFleet) -> None:
    operator = Connection(fleet.grpc_address)
    with stream_on_each(fleet) as streams:
        for request_id, stream in streams.items():
            request = control_pb2.AbortRequest(request_id=request_id)
            assert operator.control.Abort(request, timeout=20).num_ended == 1
            wait_until(lambda stream=stream: stream.is_over)  # type: ignore[misc]
            assert stream.error is not None
            assert stream.error.code() == grpc.StatusCode.CANCELLED
            assert "was ended by an operator" in (stream.error.details() or "")
        nobody = control_pb2.AbortRequest(request_id="nobody")
        assert operator.control.Abort(nobody, timeout=20).num_ended == 0
        with pytest.raises(grpc.RpcError) as refused:
            operator.control.Abort(control_pb2.AbortRequest(), timeout=20)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    operator.close()
    wait_until(lambda: not fleet.engine.running)


def test_what_is_set_of_speculation_in_one_is_remembered_by_all(fleet: RunningFleet) -> None:
    operator = Connection(fleet.grpc_address)
    operator.control.SetSpeculation(control_pb2.SetSpeculationRequest(policy="off"), timeout=20)
    os.kill(fleet.pid(1), signal.SIGKILL)  # maybe the one that was told
    fleet.wait_said("gateway 1 back after")
    lives = fleet.engine.lives
    fleet.engine.die()
    wait_until(lambda: fleet.engine.lives > lives)
    # Each says so before its link counts as made; the states in the registry may be older.
    wait_until(lambda: len(fleet.engine.speculation_links) == SIZE)
    assert fleet.engine.speculation.status().settings.policy == "off"
    operator.close()
    fleet.call(fleet.fleet.wait_serving())


def test_draining_reaches_all_and_lasts_and_a_cut_stream_says_why(fleet: RunningFleet) -> None:
    with stream_on_each(fleet) as streams:
        operator = Connection(fleet.grpc_address)
        operator.control.Drain(control_pb2.DrainRequest(), timeout=20)
        members = fleet.fleet.registry.members
        wait_until(lambda: {each.state for each in members.values()} == {"draining"})
        for _ in range(2 * SIZE):
            refused = Connection(fleet.grpc_address)
            refused.stream()
            wait_until(lambda refused=refused: refused.is_over)  # type: ignore[misc]
            assert refused.error is not None and "stopping" in (refused.error.details() or "")
            refused.close()
        told = {name: len(each.arrivals) for name, each in streams.items()}
        wait_until(lambda: all(len(each.arrivals) > told[n] for n, each in streams.items()))

        pids = [fleet.pid(index) for index in range(SIZE)]
        fleet.call(fleet.fleet.stop(0.2))
        for stream in streams.values():
            wait_until(lambda stream=stream: stream.is_over)  # type: ignore[misc]
            error = stream.error
            assert error is not None and error.code() == grpc.StatusCode.UNAVAILABLE
            assert "the server was stopped" in (error.details() or "")
            assert MARK in [tuple(each) for each in error.trailing_metadata() or ()]
        assert not any(map(is_alive, pids))
        operator.close()
