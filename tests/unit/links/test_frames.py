"""Frames on a byte stream."""

from __future__ import annotations

import struct

import pytest

from outrider.links.frames import (
    HEARTBEAT_FRAME,
    MAGIC,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    FrameDecoder,
    LinkError,
    pack,
)


def header(
    magic: bytes = MAGIC, version: int = PROTOCOL_VERSION, kind: int = 0, length: int = 0
) -> bytes:
    return struct.pack("!4sBBI", magic, version, kind, length)


def test_a_frame_is_a_ten_byte_header_and_the_payload() -> None:
    assert pack(b"abc") == header(length=3) + b"abc"


def test_a_stream_may_come_byte_by_byte() -> None:
    stream = pack(b"one") + HEARTBEAT_FRAME + pack(b"") + pack(b"two")
    decoder = FrameDecoder()
    found = [payload for byte in stream for payload in decoder.feed(bytes([byte]))]
    assert found == [b"one", b"", b"two"]


def test_several_frames_may_come_at_once() -> None:
    stream = pack(b"one") + pack(b"two") + pack(b"three")
    decoder = FrameDecoder()
    assert decoder.feed(stream[:-1]) == [b"one", b"two"]
    assert decoder.feed(stream[-1:]) == [b"three"]


def test_a_heartbeat_brings_no_payload() -> None:
    assert FrameDecoder().feed(HEARTBEAT_FRAME * 3) == []


@pytest.mark.parametrize("split", [0, 4, 9])
def test_a_stream_of_something_else_is_refused(split: int) -> None:
    decoder = FrameDecoder()
    request = b"GET / HTTP/1.1\r\n"
    decoder.feed(request[:split])
    with pytest.raises(LinkError, match="GET .*does not speak the link protocol"):
        decoder.feed(request[split:])


def test_another_version_is_refused_with_both_versions() -> None:
    with pytest.raises(LinkError, match="version 9, this process reads version 1"):
        FrameDecoder().feed(header(version=9))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LinkError, match="unknown kind 5"):
        FrameDecoder().feed(header(kind=5))


def test_a_frame_over_the_limit_is_refused_by_its_header_alone() -> None:
    with pytest.raises(LinkError, match=f"announces {MAX_FRAME_BYTES + 1} bytes"):
        FrameDecoder().feed(header(length=MAX_FRAME_BYTES + 1))


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(LinkError, match="over the limit"):
        pack(bytes(MAX_FRAME_BYTES + 1))


def test_a_bad_header_after_a_good_frame_is_refused() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(pack(b"one") + b"OR") == [b"one"]
    with pytest.raises(LinkError, match="does not speak"):
        decoder.feed(b"XX" + bytes(6))
