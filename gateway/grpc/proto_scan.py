"""Counts the fields of a protobuf message without parsing it.

Two bytes encode an empty nested message, which parses into an object of two hundred. So the fields
of a request are counted first, up to a limit; strings and packed lists of numbers are skipped.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import RequestError

# Enough for the longest conversation: each message with its role, its name and a few parts.
MAX_FIELDS = 2**16
_ID_BYTES = 5  # of the largest number of 32 bits


def check_counts(data: bytes, descriptor: Any, max_ids: int) -> None:
    """Raises `RequestError` if the message has too many fields or a list of more numbers than
    `max_ids`. Malformed bytes are left to the parser."""
    try:
        _check_counts(data, descriptor, max_ids)
    except IndexError:
        return


def _check_counts(data: bytes, descriptor: Any, max_ids: int) -> None:
    left = MAX_FIELDS
    inside = [(0, len(data), descriptor)]
    while inside:
        at, end, kind = inside.pop()
        fields = kind.fields_by_number
        while at < end:
            left -= 1
            if left < 0:
                raise RequestError(
                    f"the request has more than {MAX_FIELDS} messages, parts and other fields; "
                    "send fewer at once, and lists of numbers packed."
                )
            tag, at = _varint(data, at)
            match tag & 7:
                case 2:
                    size, at = _varint(data, at)
                    field = fields.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        inside.append((at, min(at + size, end), field.message_type))
                    elif field is not None and field.cpp_type not in (
                        field.CPPTYPE_STRING,
                        field.CPPTYPE_MESSAGE,
                    ):
                        _check_ids(field.name, size, max_ids)
                    at += size
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 5:
                    at += 4


def _check_ids(name: str, num_bytes: int, max_ids: int) -> None:
    if num_bytes > _ID_BYTES * max_ids:
        raise RequestError(
            f"{name} has {num_bytes // _ID_BYTES} entries or more; it may have {max_ids}, so send "
            "fewer."
        )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    value, shift = byte & 127, 7
    while byte & 128:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise IndexError("malformed varint")
    return value, at + 1
