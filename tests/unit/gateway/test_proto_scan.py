"""Counting the fields of protobuf messages without parsing them."""

from __future__ import annotations

import time

import pytest

from outrider.errors import RequestError
from outrider.gateway.grpc.proto_scan import MAX_FIELDS, check_counts
from outrider.proto import generation_pb2

GENERATE = generation_pb2.GenerateRequest.DESCRIPTOR


def _check(data: bytes, max_ids: int = 1000) -> None:
    check_counts(data, GENERATE, max_ids)


def _within(field: int, inner: bytes) -> bytes:
    """A field that is a message."""
    size, num = b"", len(inner)
    while num > 127:
        size, num = size + bytes([num & 127 | 128]), num >> 7
    return bytes([(field << 3 | 2) & 127]) + size + bytes([num]) + inner


def test_a_long_conversation_passes() -> None:
    request = generation_pb2.GenerateRequest(text="")
    for _ in range(10_000):
        message = request.chat.messages.add(role="user", name="me")
        message.parts.add(text="a\n" * 20)
    _check(request.SerializeToString())


def test_millions_of_empty_messages_are_refused_at_once() -> None:
    chat = b"\x0a\x00" * 2_000_000
    start_s = time.process_time()
    with pytest.raises(RequestError, match=f"more than {MAX_FIELDS} messages, parts"):
        _check(_within(12, chat))
    assert time.process_time() - start_s < 5


def test_newlines_in_a_text_are_no_fields() -> None:
    _check(generation_pb2.GenerateRequest(text="\n" * 4_000_000).SerializeToString())


def test_fields_nobody_knows_count_as_well() -> None:
    with pytest.raises(RequestError, match="fields"):
        _check(b"\xf8\x7f\x01" * (MAX_FIELDS + 1))


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_packed_numbers_are_bounded_by_how_many_there_can_be(field: str) -> None:
    request = generation_pb2.GenerateRequest()
    ids = getattr(request.sampling, field)
    getattr(ids, "ids", ids).extend([300_000_000] * 1000)
    _check(request.SerializeToString())
    with pytest.raises(RequestError, match=r"ids has 1000 entries or more; it may have 999"):
        _check(request.SerializeToString(), 999)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a", b"\xff" * 20, b"\x0b\x0c", b"\x62\xff\xff\x7f"])
def test_what_is_no_message_is_left_to_the_parser(data: bytes) -> None:
    _check(data)
