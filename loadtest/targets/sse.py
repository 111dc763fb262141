"""Splits a byte stream into server-sent events, independent of chunk boundaries."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 2**20


class EventTooLongError(ValueError):
    """An event exceeds `MAX_EVENT_BYTES`."""


class EventSplitter:
    """Buffers bytes and returns the data of every completed event.

    Lines end in LF, CRLF or CR. Comments, event names and ids are ignored.
    """

    __slots__ = ("_after_cr", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        if self._after_cr or b"\r" in data:
            data = self._without_cr(data)
        if self._rest:
            data = self._rest + data
        blocks = data.split(b"\n\n")
        rest = self._rest = blocks.pop()
        if len(rest) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:  # fast path of nearly all events
                events.append(block[6:])
            elif (event := _data_of(block)) is not None:
                events.append(event)
        return events

    def end(self) -> bytes | None:
        """Data after the last blank line, if it is an event, complete or not."""
        rest, self._rest = self._rest, b""
        return _data_of(rest)

    def _without_cr(self, data: bytes) -> bytes:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(block: bytes) -> bytes | None:
    lines = []
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines) if lines else None
