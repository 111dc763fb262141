"""A link for blocking programs: send a message, receive a message.

For low latency, messages are sent and received in the caller's thread. A second thread per channel
sends heartbeats while nothing else is sent, so that a rank that computes for a minute is not taken
for dead. A dead process closes its socket, which is detected at once; silence means a hung one.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from outrider.errors import ConfigError
from outrider.links.address import tune
from outrider.links.codec import Codec
from outrider.links.frames import (
    HEARTBEAT_FRAME,
    FrameDecoder,
    LinkClosedError,
    LinkError,
    LinkTimeoutError,
    pack,
)

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
_READ_BYTES = 2**16


class Channel:
    """Messages both ways over a connected socket, which the channel owns.

    Any thread may send or close; one thread at a time receives. Messages sent before the peer died
    can still be received; after them every `receive` raises `LinkClosedError` (the peer is gone) or
    `LinkTimeoutError` (it hangs). `peer` names the peer in these errors.
    """

    def __init__(
        self,
        sock: socket.socket,
        codec: Codec,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        peer: str = "the peer",
    ) -> None:
        check_times(heartbeat_s, silence_s)
        sock.setblocking(False)
        tune(sock)
        self.peer = peer
        self._sock = sock
        self._codec = codec
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._closed = threading.Event()
        # Reentrant: a signal handler may close the channel that its thread is using.
        self._send_lock = threading.RLock()
        self._receive_lock = threading.RLock()
        self._decoder = FrameDecoder()
        self._payloads: deque[bytes] = deque()
        self._failure: LinkError | None = None  # of receiving
        self._send_failure: LinkError | None = None
        self._unsent = b""  # the rest of a partially sent heartbeat
        self._sent_at_s = self._heard_at_s = time.monotonic()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        threading.Thread(target=self._beat, name=f"heartbeat to {peer}", daemon=True).start()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """For `select`; -1 once closed. Readable may mean a heartbeat only: see `wait_any`."""
        return self._sock.fileno()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def has_buffered(self) -> bool:
        """Whether the next `receive` returns without looking at the socket."""
        return bool(self._payloads)

    def close(self) -> None:
        """End the link. May be called again, and from any thread; a thread inside `send` or
        `receive` gets a `LinkClosedError`."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes threads that wait on the socket
        # Closed last: no thread may be left polling a descriptor number that was reused.
        with self._send_lock, self._receive_lock:
            self._sock.close()

    # -- sending ------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        self.send_encoded(self._codec.encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Send a payload of `Codec.encode`, so that a message for many peers is encoded once.

        Blocks while the peer's buffer is full, at most `silence_s` without progress.
        """
        frame = pack(payload)
        with self._send_lock:
            if self._send_failure is not None:
                raise _again(self._send_failure)
            if self._unsent:
                frame, self._unsent = self._unsent + frame, b""
            try:
                num_sent = self._send_now(frame)
                if num_sent < len(frame):
                    self._send_rest(memoryview(frame)[num_sent:])
            except OSError as error:
                raise self._fail_sending(self._gone(error)) from error
            self._sent_at_s = time.monotonic()

    def _send_rest(self, rest: memoryview) -> None:
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while rest:
            if not writable.poll(_milliseconds(self._silence_s)):
                raise self._fail_sending(
                    LinkTimeoutError(
                        f"{self.peer} has taken nothing for {self._silence_s:g} s while a message "
                        "was sent to it; it hangs."
                    )
                )
            rest = rest[self._send_now(rest) :]

    def _send_now(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def _fail_sending(self, failure: LinkError) -> LinkError:
        """Part of a frame may have been sent: no other can follow it."""
        self._send_failure = failure
        return failure

    def _beat(self) -> None:
        wait_s = self._heartbeat_s
        while not self._closed.wait(wait_s):
            due_s = self._sent_at_s + self._heartbeat_s - time.monotonic()
            if due_s > 0:
                wait_s = due_s
                continue
            wait_s = self._heartbeat_s
            # Never wait for a send in progress: it is a sign of life itself, and may be stuck.
            if self._send_lock.acquire(blocking=False):
                try:
                    if not self._send_heartbeat():
                        return
                finally:
                    self._send_lock.release()

    def _send_heartbeat(self) -> bool:
        """Whether another may follow. A full buffer is no error: the peer has unread data."""
        if self._send_failure is not None:
            return False
        beat = self._unsent or HEARTBEAT_FRAME
        try:
            num_sent = self._send_now(beat)
        except OSError:  # the owner's next call raises it
            return False
        if num_sent:
            self._unsent = beat[num_sent:]
            self._sent_at_s = time.monotonic()
        return True

    # -- receiving ----------------------------------------------------------------------------

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message.

        Raises `TimeoutError` if none arrives within `timeout_s` although the peer is alive, and a
        `LinkError` once the link has ended.
        """
        with self._receive_lock:
            if not self._payloads:
                self._wait_for_payload(None if timeout_s is None else time.monotonic() + timeout_s)
            return self._codec.decode(self._payloads.popleft())

    def _wait_for_payload(self, deadline_s: float | None) -> None:
        while not self._payloads:
            if self._closed.is_set():
                raise self._gone(None)
            if self._failure is not None:
                raise _again(self._failure)
            wait_s = self._silence_left_s()
            if deadline_s is not None:
                wait_s = min(wait_s, deadline_s - time.monotonic())
            self._readable.poll(_milliseconds(wait_s))
            is_quiet = not self._read_available()
            if is_quiet and deadline_s is not None and time.monotonic() >= deadline_s:
                if self._failure is not None:
                    raise _again(self._failure)
                raise TimeoutError(f"{self.peer} sent no message in time")

    def _silence_left_s(self) -> float:
        return max(self._heard_at_s + self._silence_s - time.monotonic(), 0.0)

    def _read_available(self) -> bool:
        """Read without waiting; whether anything arrived, including a heartbeat or the end.

        Reads the socket before it checks for silence: heartbeats may be buffered there while the
        owner was busy.
        """
        if self._failure is not None:
            return True
        try:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                self._failure = self._gone(None)
                return True
            self._heard_at_s = time.monotonic()
            self._payloads.extend(self._decoder.feed(data))
        except BlockingIOError:
            if self._silence_left_s() == 0:
                self._failure = LinkTimeoutError(
                    f"{self.peer} has been silent for {self._silence_s:g} s; it hangs or cannot "
                    "be reached."
                )
            return False
        except OSError as error:
            self._failure = self._gone(error)
        except LinkError as error:
            self._failure = error
        return True

    def _gone(self, error: OSError | None) -> LinkClosedError:
        if self._closed.is_set():
            return LinkClosedError(f"the link to {self.peer} was closed on this side.")
        reason = "" if error is None else f" ({error.strerror or error})"
        return LinkClosedError(f"{self.peer} has closed the link{reason}; its process has ended.")

    @property
    def _is_ready(self) -> bool:
        return bool(self._payloads) or self._failure is not None


def wait_any(channels: Sequence[Channel], timeout_s: float | None = None) -> list[Channel]:
    """The channels whose `receive` returns or raises at once, in order; none on timeout.

    Every call polls every socket, so a busy channel hides neither messages nor the death of
    another. Only the thread that receives from these channels may call it.
    """
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        ready = any(channel._is_ready for channel in channels)
        waits = [channel._silence_left_s() for channel in channels]
        wait_s = 0.0 if ready else min([*waits, deadline_s - time.monotonic()])
        _poll(channels, wait_s)
        found = [channel for channel in channels if channel._is_ready]
        if found or time.monotonic() >= deadline_s:
            return found


def wait_reading(channel: Channel, beside: Channel) -> None:
    """Wait until `receive` of a channel returns or raises at once. Meanwhile read what arrives on
    the one beside it, for later: else its peer's heartbeats would fill it and block its messages.
    """
    while not channel._is_ready:
        both = [channel] if beside._failure is not None or beside.is_closed else [channel, beside]
        _poll(both, min(each._silence_left_s() for each in both))


def _poll(channels: Sequence[Channel], wait_s: float) -> None:
    poller = select.poll()
    by_descriptor = {channel.fileno(): channel for channel in channels}
    if -1 in by_descriptor:  # closed on this side: nothing to wait for
        by_descriptor.pop(-1)
        wait_s = 0.0
    for descriptor in by_descriptor:
        poller.register(descriptor, select.POLLIN)
    readable = {descriptor for descriptor, _ in poller.poll(_milliseconds(wait_s))}
    for channel in channels:
        if channel.fileno() in readable or channel.is_closed or channel._silence_left_s() == 0:
            with channel._receive_lock:
                channel._read_available()


def check_times(heartbeat_s: float, silence_s: float) -> None:
    if not 0 < heartbeat_s < silence_s:
        raise ConfigError(
            f"heartbeat_s is {heartbeat_s:g} and silence_s is {silence_s:g}; heartbeat_s must be "
            "positive and less than silence_s."
        )


def _milliseconds(seconds: float) -> int:
    return math.ceil(max(seconds, 0.0) * 1000)


def _again(failure: LinkError) -> LinkError:
    """A new instance: raising the same one repeatedly would accumulate tracebacks."""
    return type(failure)(*failure.args)
