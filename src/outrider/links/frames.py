"""Framing of messages on a byte stream.

A frame is a header (magic, protocol version, kind, length) and a payload. The length is limited, so
a stray or hostile stream cannot make a process allocate what it claims. The version is in every
header, so incompatible releases report the mismatch. Nothing here touches a socket.
"""

from __future__ import annotations

import struct

from outrider.errors import OutriderError

MAGIC = b"ORLK"
PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 2**20

_DATA = 0
_HEARTBEAT = 1
_HEADER = struct.Struct("!4sBBI")
HEADER_BYTES = _HEADER.size


class LinkError(OutriderError):
    """A link failed: connection, authentication or an unreadable message."""


class LinkClosedError(LinkError):
    """The peer is gone, or this side has closed the link."""


class LinkTimeoutError(LinkError):
    """The link is open, but the peer has sent or read nothing for too long."""


HEARTBEAT_FRAME = _HEADER.pack(MAGIC, PROTOCOL_VERSION, _HEARTBEAT, 0)


def pack(payload: bytes) -> bytes:
    """The payload as one frame."""
    if len(payload) > MAX_FRAME_BYTES:
        raise LinkError(
            f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}; "
            "send it in parts."
        )
    return _HEADER.pack(MAGIC, PROTOCOL_VERSION, _DATA, len(payload)) + payload


class FrameDecoder:
    """Turns the chunks of a byte stream into payloads.

    Heartbeats are dropped: their arrival is their meaning. After an error the decoder must not be
    fed again.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # the start of an incomplete frame

    def feed(self, data: bytes) -> list[bytes]:
        rest = self._rest
        if not rest:
            payloads, used = _split(data)
            if used < len(data):
                rest += data[used:] if used else data
            return payloads
        rest += data
        if len(rest) < _frame_bytes(rest):
            return []
        payloads, used = _split(bytes(rest))
        del rest[:used]
        return payloads


def _split(data: bytes) -> tuple[list[bytes], int]:
    """The payloads of the complete frames at the front, and the bytes these frames take."""
    payloads: list[bytes] = []
    start = 0
    while len(data) - start >= HEADER_BYTES:
        magic, version, kind, length = _HEADER.unpack_from(data, start)
        _check_header(magic, version, kind, length)
        end = start + HEADER_BYTES + length
        if end > len(data):
            break
        if kind == _DATA:
            payloads.append(data[start + HEADER_BYTES : end])
        start = end
    return payloads, start


def _frame_bytes(data: bytearray) -> int:
    """The length of the frame at the front; of a header alone while that is incomplete."""
    if len(data) < HEADER_BYTES:
        return HEADER_BYTES
    magic, version, kind, length = _HEADER.unpack_from(data)
    _check_header(magic, version, kind, length)
    return HEADER_BYTES + int(length)


def _check_header(magic: bytes, version: int, kind: int, length: int) -> None:
    if magic != MAGIC:
        raise LinkError(
            f"the stream has {magic!r} where a frame must begin with {MAGIC!r}; "
            "the peer does not speak the link protocol."
        )
    if version != PROTOCOL_VERSION:
        raise LinkError(
            f"the peer sends frames of protocol version {version}, this process reads version "
            f"{PROTOCOL_VERSION}; run the same release on both sides."
        )
    if kind not in (_DATA, _HEARTBEAT):
        raise LinkError(f"a frame has the unknown kind {kind}; known are {_DATA} and {_HEARTBEAT}.")
    if length > MAX_FRAME_BYTES:
        raise LinkError(
            f"a frame announces {length} bytes, over the limit of {MAX_FRAME_BYTES}; "
            "the peer is broken or not an Outrider process."
        )
