"""The handshake of a link: both sides prove that they know the secret; the dialler sends a `Hello`.

    dialling                                   listening
    magic, version, nonce               -->
                                        <--    magic, version, nonce
    proof over all of it, and a Hello   -->
                                        <--    accepted, and a proof over all of it; or refused

A proof is an HMAC-SHA256 over a label of its direction, both openings and the Hello. Fresh nonces
prevent replay, and the labels prevent reflection. The listener proves nothing before the dialler
has, and a refusal carries no reason. The opening has the same form in every version, so that
versions can always be compared.

The secret authenticates; it neither encrypts nor signs the traffic, which belongs on a trusted or
encrypted network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

from outrider.errors import ConfigError
from outrider.links.address import RETRY_S, dial
from outrider.links.codec import Codec
from outrider.links.frames import (
    MAGIC,
    PROTOCOL_VERSION,
    LinkClosedError,
    LinkError,
    LinkTimeoutError,
)
from outrider.links.rank_messages import Hello

T = TypeVar("T")

MAX_HELLO_BYTES = 4096

_NONCE_BYTES = 32
_OPENING = struct.Struct(f"!4sB{_NONCE_BYTES}s")
_PROOF_BYTES = hashlib.sha256().digest_size
_INTRODUCTION = struct.Struct(f"!{_PROOF_BYTES}sH")
_ANSWER = struct.Struct(f"!B{_PROOF_BYTES}s")
_REFUSAL = _ANSWER.pack(0, bytes(_PROOF_BYTES))
_DIALLER = b"outrider link: dialler"
_LISTENER = b"outrider link: listener"
_HELLO_CODEC = Codec(Hello)


class Turn(NamedTuple):
    """A side's next action: send `send`, then read exactly `read` bytes."""

    send: bytes
    read: int


Script: TypeAlias = Generator[Turn, bytes, T]


def greet(sock: socket.socket, secret: str, hello: Hello, timeout_s: float) -> None:
    """The dialling side. Returns once the listener has accepted and authenticated itself."""
    _play(sock, dialler_script(secret, hello), timeout_s)


def dial_in(address: str, secret: str, hello: Hello, timeout_s: float) -> socket.socket:
    """An authenticated socket. Retries until the timeout while there is no listener, or while the
    listener closes the connection because too many handshakes are in progress."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        sock = dial(address, max(deadline_s - time.monotonic(), 0.0))
        try:
            greet(sock, secret, hello, max(deadline_s - time.monotonic(), RETRY_S))
            return sock
        except LinkClosedError:
            sock.close()
            if time.monotonic() > deadline_s - RETRY_S:
                raise
        except BaseException:
            sock.close()
            raise
        time.sleep(RETRY_S)


def receive_greeting(
    sock: socket.socket, secret: str, timeout_s: float, on_proof: Callable[[], None] | None = None
) -> Hello:
    """The listening side: returns the dialler's `Hello`. Raises if it is refused; the caller then
    closes the socket.

    `on_proof` is called once the dialler is authenticated, before it is accepted; it may raise.
    """
    return _play(sock, listener_script(secret, on_proof), timeout_s)


# -- the exchange, without a socket -----------------------------------------------------------


def dialler_script(secret: str, hello: Hello) -> Script[None]:
    key = _key(secret)
    who = _HELLO_CODEC.encode(hello)
    if len(who) > MAX_HELLO_BYTES:
        raise LinkError(f"a Hello of {len(who)} bytes is over the limit of {MAX_HELLO_BYTES}.")
    ours = _opening()
    theirs = yield Turn(ours, _OPENING.size)
    _check_opening(theirs)
    shared = ours + theirs + who
    answer = yield Turn(
        _INTRODUCTION.pack(_proof(key, _DIALLER, shared), len(who)) + who, _ANSWER.size
    )
    accepted, proof = _ANSWER.unpack(answer)
    if not accepted:
        raise LinkError(
            "the listener refused this process, most likely for its secret; "
            "start both sides with the same one."
        )
    if not hmac.compare_digest(proof, _proof(key, _LISTENER, shared)):
        raise LinkError(
            "the listener does not know the secret; check that the address is the engine's and "
            "start both sides with the same secret."
        )


def listener_script(secret: str, on_proof: Callable[[], None] | None = None) -> Script[Hello]:
    key = _key(secret)
    ours = _opening()
    theirs = yield Turn(b"", _OPENING.size)
    magic, version, _ = _OPENING.unpack(theirs)
    if magic == MAGIC and version != PROTOCOL_VERSION:
        yield Turn(ours, 0)  # so that the dialler sees our version
    _check_opening(theirs)
    introduction = yield Turn(ours, _INTRODUCTION.size)
    proof, who_bytes = _INTRODUCTION.unpack(introduction)
    who = b""
    if 0 < who_bytes <= MAX_HELLO_BYTES:
        who = yield Turn(b"", who_bytes)
    shared = theirs + ours + who
    if not hmac.compare_digest(proof, _proof(key, _DIALLER, shared)):
        yield Turn(_REFUSAL, 0)
        raise LinkError("a process connected with another secret and was refused.")
    try:
        hello: Hello = _HELLO_CODEC.decode(who)
    except LinkError:
        yield Turn(_REFUSAL, 0)
        raise
    if on_proof is not None:
        on_proof()
    yield Turn(_ANSWER.pack(1, _proof(key, _LISTENER, shared)), 0)
    return hello


def _key(secret: str) -> bytes:
    if not secret:
        raise ConfigError("the link secret is empty; set one and give it to every process.")
    return secret.encode()


def _opening() -> bytes:
    return _OPENING.pack(MAGIC, PROTOCOL_VERSION, secrets.token_bytes(_NONCE_BYTES))


def _check_opening(opening: bytes) -> None:
    magic, version, _ = _OPENING.unpack(opening)
    if magic != MAGIC:
        raise LinkError(
            f"the peer opened with {magic!r} instead of {MAGIC!r}; "
            "it does not speak the link protocol, check the address."
        )
    if version != PROTOCOL_VERSION:
        raise LinkError(
            f"the peer speaks version {version} of the link protocol, this process version "
            f"{PROTOCOL_VERSION}; run the same release on both sides."
        )


def _proof(key: bytes, label: bytes, shared: bytes) -> bytes:
    return hmac.digest(key, label + shared, "sha256")


# -- on a blocking socket ---------------------------------------------------------------------


def _play(sock: socket.socket, script: Script[T], timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    blocking_s = sock.gettimeout()
    try:
        turn = next(script)
        while True:
            _set_time_left(sock, deadline)
            sock.sendall(turn.send)
            turn = script.send(_read_exactly(sock, turn.read, deadline))
    except StopIteration as finished:
        result: T = finished.value
        return result
    except TimeoutError as error:
        raise timed_out(timeout_s) from error
    except OSError as error:
        raise hung_up() from error
    finally:
        script.close()
        if sock.fileno() != -1:
            sock.settimeout(blocking_s)


def _read_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Reads no byte more: what follows the handshake belongs to the channel."""
    data = b""
    while len(data) < num_bytes:
        _set_time_left(sock, deadline)
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise hung_up()
        data += piece
    return data


def _set_time_left(sock: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)


def timed_out(timeout_s: float) -> LinkTimeoutError:
    return LinkTimeoutError(
        f"the peer did not finish the handshake within {timeout_s:g} s; "
        "check that the address is the engine's and that the peer is not overloaded."
    )


def hung_up() -> LinkClosedError:
    return LinkClosedError(
        "the peer closed the connection during the handshake; an Outrider peer logs why."
    )
