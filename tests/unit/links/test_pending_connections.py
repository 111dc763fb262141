"""The bound on connections that have not authenticated yet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from outrider.links import pending_connections
from outrider.links.pending_connections import PendingConnections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pair]]:
    """One more connection than may be pending, each with its far end."""
    monkeypatch.setattr(pending_connections, "MAX_PENDING", 2)
    with ExitStack() as stack:
        opened = [socket.socketpair() for _ in range(3)]
        for each in (end for pair in opened for end in pair):
            stack.enter_context(each)
        yield opened


def _is_shut_down(far: socket.socket) -> bool:
    far.setblocking(False)
    try:
        return far.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_oldest_is_shut_down_for_one_beyond_the_limit(pairs: list[Pair]) -> None:
    pending = PendingConnections()
    for near, _ in pairs:
        pending.add(near)
    assert [_is_shut_down(far) for _, far in pairs] == [True, False, False]
    assert [pending.remove(near) for near, _ in pairs] == [False, True, True]
    assert len(pending) == 0


def test_a_removed_connection_counts_no_more(pairs: list[Pair]) -> None:
    pending = PendingConnections()
    for near, _ in pairs:
        pending.add(near)
        assert pending.remove(near)
        assert not pending.remove(near)
    assert not any(_is_shut_down(far) for _, far in pairs)


def test_a_connection_that_has_ended_can_be_shut_down(pairs: list[Pair]) -> None:
    pending = PendingConnections()
    pending.add(pairs[0][0])
    pairs[0][0].close()
    for near, _ in pairs[1:]:
        pending.add(near)
    assert [pending.remove(near) for near, _ in pairs] == [False, True, True]


def test_all_can_be_shut_down_at_once(pairs: list[Pair]) -> None:
    pending = PendingConnections()
    for near, _ in pairs[:2]:
        pending.add(near)
    pending.shut_down()
    assert [_is_shut_down(far) for _, far in pairs] == [True, True, False]
