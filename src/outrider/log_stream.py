"""Non-blocking stderr for server processes: a stalled reader never blocks the writer.

A write to a full pipe blocks. Lines go to a bounded queue instead, which a thread writes to the
pipe. When the queue is full, lines are dropped and counted; the count is logged once the reader
reads again.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO, cast

MAX_QUEUED_CHARS = 1 << 20
DRAIN_S = 1.0  # at the end of a process


def dropped_line(num_lines: int) -> str:
    return f"{num_lines} log lines dropped: the reader of stderr does not keep up"


class DroppingStream(io.TextIOBase):
    """Queues text; a thread writes it to the descriptor of `stream`."""

    def __init__(self, stream: TextIO, max_chars: int = MAX_QUEUED_CHARS) -> None:
        self.format_dropped: Callable[[int], str] = dropped_line  # a line, without its end
        self._stream = stream
        self._fd = stream.fileno()
        self._max_chars = max_chars
        self._queue: deque[str] = deque()
        self._reset()

    def _reset(self) -> None:
        """Also called in a forked child: it has no thread, and the parent writes the queue."""
        self._queue.clear()
        self._num_chars = 0
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    # -- as a stream --------------------------------------------------------------------------

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Never waits; see `drain`."""

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click finds out by b"" whether a stream is binary
            raise TypeError(f"write() takes text, not {type(text).__name__}")
        with self._changed:
            if self._num_chars >= self._max_chars:
                self._num_dropped += text.count("\n")
                return len(text)
            self._put_dropped()
            self._put(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return len(text)

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Block until the queue is written, or until the timeout."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._put_dropped()
            while (self._queue or self._is_writing) and self._thread is not None:
                if not self._changed.wait(deadline_s - time.monotonic()):
                    return

    def _put(self, text: str) -> None:
        self._queue.append(text)
        self._num_chars += len(text)

    def _put_dropped(self) -> None:
        if self._num_dropped:
            self._put(self.format_dropped(self._num_dropped) + "\n")
            self._num_dropped = 0

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                if not self._queue:
                    self._put_dropped()
                self._changed.notify_all()
                while not self._queue:
                    self._changed.wait()
                text = self._queue.popleft()
                self._is_writing = True
            self._write_all(text.encode("utf-8", "backslashreplace"))
            with self._changed:
                self._num_chars -= len(text)

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another process has made the terminal non-blocking
                select.select((), (self._fd,), ())
            except OSError:  # the reader is gone
                return


_streams: dict[int, DroppingStream] = {}  # by descriptor


def never_blocking(stream: TextIO) -> TextIO:
    """A non-blocking wrapper of `stream`; `stream` itself if it is a file, which never blocks."""
    if isinstance(stream, DroppingStream):
        return stream
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or in memory
        return stream
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
        return stream
    if fd not in _streams:
        _streams[fd] = DroppingStream(stream)
    return cast(TextIO, _streams[fd])


def guard_stderr() -> None:
    """Replace the process's stderr, for tracebacks and warnings too."""
    sys.stderr = never_blocking(sys.stderr)


def drain_stderr(timeout_s: float = DRAIN_S) -> None:
    """Flush before the process ends without running exit handlers."""
    for stream in _streams.values():
        stream.drain(timeout_s)


def _after_fork() -> None:
    for stream in _streams.values():
        stream._reset()


atexit.register(drain_stderr)
os.register_at_fork(after_in_child=_after_fork)
