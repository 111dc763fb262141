"""Who is let in, and what the others are told."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.errors import ConfigError, OutriderError
from outrider.links.frames import (
    MAGIC,
    LinkClosedError,
    LinkError,
    LinkTimeoutError,
)
from outrider.links.handshake import (
    MAX_HELLO_BYTES,
    Script,
    dialler_script,
    greet,
    listener_script,
    receive_greeting,
)
from outrider.links.rank_messages import Hello, Role

HELLO = Hello(Role.DRAFT, rank=0, size=1, pid=4711, host="node-1")
SECRET = "correct horse"
OPENING_BYTES = 4 + 1 + 32
ANSWER_BYTES = 1 + 32
REFUSAL = bytes(ANSWER_BYTES)


class Side:
    """One side of a handshake without a socket: takes bytes, remembers what it sent and how it
    ended."""

    def __init__(self, script: Script[Any]) -> None:
        self._script = script
        self._inbox = b""
        self.sent = b""
        self.result: Any = None
        self.error: OutriderError | None = None
        self._turn = next(script)
        self.sent += self._turn.send

    def take(self, data: bytes) -> bytes:
        """What the side says in answer."""
        self._inbox += data
        before = len(self.sent)
        while not self._has_ended and len(self._inbox) >= self._turn.read:
            now, self._inbox = self._inbox[: self._turn.read], self._inbox[self._turn.read :]
            try:
                self._turn = self._script.send(now)
                self.sent += self._turn.send
            except StopIteration as finished:
                self.result = finished.value or "done"
            except OutriderError as error:
                self.error = error
        return self.sent[before:]

    @property
    def _has_ended(self) -> bool:
        return self.result is not None or self.error is not None


def meet(dialler: Side, listener: Side) -> None:
    data = dialler.sent
    while data:
        data = listener.take(data)
        data = dialler.take(data) if data else b""


def test_both_sides_with_the_secret_agree_and_the_listener_knows_who_dialled() -> None:
    dialler, listener = Side(dialler_script(SECRET, HELLO)), Side(listener_script(SECRET))
    meet(dialler, listener)
    assert listener.result == HELLO
    assert dialler.result == "done"


def test_a_dialler_with_another_secret_is_refused_and_learns_nothing_else() -> None:
    dialler, listener = Side(dialler_script("guess", HELLO)), Side(listener_script(SECRET))
    meet(dialler, listener)
    assert "refused" in str(listener.error)
    assert listener.sent[OPENING_BYTES:] == REFUSAL
    assert "start both sides with the same one" in str(dialler.error)


def test_a_listener_that_accepts_without_the_secret_is_found_out() -> None:
    dialler = Side(dialler_script(SECRET, HELLO))
    dialler.take(MAGIC + b"\x01" + bytes(32))
    dialler.take(b"\x01" + bytes(32))
    assert "the listener does not know the secret" in str(dialler.error)


def test_a_listener_cannot_send_the_dialler_its_own_proof_back() -> None:
    dialler = Side(dialler_script(SECRET, HELLO))
    introduction = dialler.take(MAGIC + b"\x01" + bytes(32))
    dialler.take(b"\x01" + introduction[:32])
    assert "the listener does not know the secret" in str(dialler.error)


def test_a_recorded_handshake_opens_nothing() -> None:
    dialler, listener = Side(dialler_script(SECRET, HELLO)), Side(listener_script(SECRET))
    meet(dialler, listener)
    again = Side(listener_script(SECRET))
    again.take(dialler.sent)
    assert again.result is None
    assert again.sent[OPENING_BYTES:] == REFUSAL


def test_the_answers_of_a_recorded_listener_convince_nobody() -> None:
    dialler, listener = Side(dialler_script(SECRET, HELLO)), Side(listener_script(SECRET))
    meet(dialler, listener)
    again = Side(dialler_script(SECRET, HELLO))
    again.take(listener.sent)
    assert "does not know the secret" in str(again.error)


def test_a_hello_changed_on_the_way_is_refused() -> None:
    dialler, listener = Side(dialler_script(SECRET, HELLO)), Side(listener_script(SECRET))
    introduction = dialler.take(listener.take(dialler.sent))
    listener.take(introduction.replace(b"draft", b"targe"))
    assert listener.error is not None
    assert listener.sent[OPENING_BYTES:] == REFUSAL


@pytest.mark.parametrize("announced", [0, MAX_HELLO_BYTES + 1])
def test_a_hello_of_no_possible_length_is_refused_unread(announced: int) -> None:
    listener = Side(listener_script(SECRET))
    listener.take(MAGIC + b"\x01" + bytes(32))
    listener.take(bytes(32) + struct.pack("!H", announced))
    assert listener.sent[OPENING_BYTES:] == REFUSAL


def test_the_longest_hello_is_told_before_dialling() -> None:
    long = Hello(Role.DRAFT, 0, 1, 1, host="x" * MAX_HELLO_BYTES)
    with pytest.raises(LinkError, match="over the limit"):
        next(dialler_script(SECRET, long))


def test_a_dialler_of_another_version_is_told_ours() -> None:
    listener = Side(listener_script(SECRET))
    answer = listener.take(MAGIC + b"\x02" + bytes(32))
    assert answer[:5] == MAGIC + b"\x01"
    assert "version 2 of the link protocol" in str(listener.error)


def test_a_listener_of_another_version_is_a_sentence() -> None:
    dialler = Side(dialler_script(SECRET, HELLO))
    dialler.take(MAGIC + b"\x02" + bytes(32))
    assert "speaks version 2 of the link protocol, this process version 1" in str(dialler.error)


def test_a_stranger_gets_no_answer() -> None:
    listener = Side(listener_script(SECRET))
    assert listener.take(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    assert "does not speak the link protocol" in str(listener.error)


@pytest.mark.parametrize("script", [dialler_script("", HELLO), listener_script("")])
def test_an_empty_secret_is_refused(script: Script[Any]) -> None:
    with pytest.raises(ConfigError, match="the link secret is empty"):
        next(script)


# -- over sockets -----------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_what_follows_the_handshake_is_left_on_the_socket(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair

    def dial_in() -> None:
        greet(near, SECRET, HELLO, timeout_s=60)
        near.sendall(b"first frame")

    dialler = threading.Thread(target=dial_in)
    dialler.start()
    assert receive_greeting(far, SECRET, timeout_s=60) == HELLO
    dialler.join()
    assert far.recv(100) == b"first frame"
    assert far.gettimeout() is None


def test_a_refused_process_is_told_so_over_the_socket(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    found: list[LinkError] = []

    def refuse() -> None:
        try:
            receive_greeting(far, SECRET, timeout_s=60)
        except LinkError as error:
            found.append(error)
        far.close()

    listener = threading.Thread(target=refuse)
    listener.start()
    with pytest.raises(LinkError, match="refused this process"):
        greet(near, "guess", HELLO, timeout_s=60)
    listener.join()
    assert "was refused" in str(found[0])


def test_one_who_says_nothing_does_not_hold_the_listener_up(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(LinkTimeoutError, match="did not finish the handshake within 0.1 s"):
        receive_greeting(pair[1], SECRET, timeout_s=0.1)


def test_one_who_talks_slowly_does_not_get_more_time(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair

    is_over = threading.Event()

    def trickle() -> None:
        for byte in MAGIC + b"\x01" + bytes(32):
            near.sendall(bytes([byte]))
            if is_over.wait(0.5):
                return

    dialler = threading.Thread(target=trickle)
    dialler.start()
    started_s = time.monotonic()
    with pytest.raises(LinkTimeoutError):
        receive_greeting(far, SECRET, timeout_s=0.15)
    assert time.monotonic() - started_s < 10
    is_over.set()
    dialler.join()


def test_a_peer_that_hangs_up_is_a_sentence(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.close()
    with pytest.raises(LinkClosedError, match="closed the connection during the handshake"):
        greet(near, SECRET, HELLO, timeout_s=60)
