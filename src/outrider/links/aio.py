"""A link for asyncio programs; the wire format is that of `Channel`."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any, TypeVar, cast

from outrider.links.address import (
    RETRY_S,
    TcpAddress,
    UnixAddress,
    check_retry,
    is_own_echo,
    parse,
    tune,
)
from outrider.links.channel import HEARTBEAT_S, SILENCE_S, check_times
from outrider.links.codec import Codec
from outrider.links.frames import (
    HEARTBEAT_FRAME,
    MAX_FRAME_BYTES,
    FrameDecoder,
    LinkClosedError,
    LinkError,
    LinkTimeoutError,
    pack,
)
from outrider.links.handshake import Script, dialler_script, hung_up, listener_script, timed_out
from outrider.links.rank_messages import Hello

T = TypeVar("T")

MAX_UNRECEIVED_BYTES = MAX_FRAME_BYTES  # beyond it, reading from the socket pauses


class AsyncChannel(asyncio.Protocol):
    """Messages both ways over a connected socket, in one event loop.

    Messages sent before the peer died can still be received; after them every `receive` raises
    `LinkClosedError` (the peer is gone) or `LinkTimeoutError` (it hangs).
    Made by `open_channel` and `accept_channel`.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        heartbeat_s: float,
        silence_s: float,
        peer: str,
        ends_when_silent: bool = True,
    ) -> None:
        check_times(heartbeat_s, silence_s)
        self.peer = peer
        self._codec = codec
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._ends_when_silent = ends_when_silent
        self._decoder = FrameDecoder()
        self._payloads: deque[bytes] = deque()
        self._num_bytes = 0  # of them
        self._is_paused = False  # reading, until they are received
        self._arrival = asyncio.Event()  # of a message, or of the end
        self._failure: LinkError | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_sent = False  # since the last beat
        self._quiet_beats = 0

    @property
    def is_closed(self) -> bool:
        """Whether the link has ended; earlier messages may still be waiting."""
        return self._failure is not None

    @property
    def is_silent(self) -> bool:
        """The peer has sent nothing for `silence_s`, though the link is open."""
        return self._quiet_beats * self._heartbeat_s > self._silence_s

    @property
    def has_unsent(self) -> bool:
        """The peer has not read all that was sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def send(self, message: object) -> None:
        """Queue a message; it is sent at once unless the peer does not read."""
        self.send_encoded(self._codec.encode(message))

    def send_encoded(self, payload: bytes) -> None:
        frame = pack(payload)
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            self._end(LinkTimeoutError(f"{self.peer} does not read what is sent to it; it hangs."))
        self._raise_if_ended()
        self._transport.write(frame)
        self._has_sent = True

    async def receive(self) -> Any:
        """The next message. One task at a time may await it; cancelling loses no message."""
        while not self._payloads:
            self._raise_if_ended()
            self._arrival.clear()
            await self._arrival.wait()
        payload = self._payloads.popleft()
        self._num_bytes -= len(payload)
        if self._is_paused and self._num_bytes <= MAX_UNRECEIVED_BYTES and self._transport:
            self._is_paused = False
            self._transport.resume_reading()
        return self._codec.decode(payload)

    def close(self) -> None:
        """End the link; queued messages are still sent if the peer reads them within `silence_s`.
        May be called again."""
        self._end(LinkClosedError(f"the link to {self.peer} was closed on this side."))
        if self._transport is not None and self._transport.get_write_buffer_size():
            loop = asyncio.get_running_loop()
            loop.call_later(self._silence_s, self._transport.abort)

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            # A new instance: raising the same one repeatedly would accumulate tracebacks.
            raise type(self._failure)(*self._failure.args)

    def _end(self, failure: LinkError) -> None:
        if self._failure is None:
            self._failure = failure
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            if isinstance(failure, LinkClosedError):
                self._transport.close()
            else:
                self._transport.abort()
        self._arrival.set()

    def _beat(self) -> None:
        """Counts beats, not seconds: an event loop that was blocked must not mistake its own pause
        for the peer's silence."""
        self._quiet_beats += not self._is_paused  # while paused, the peer's bytes are unread
        if self.is_silent and self._ends_when_silent:
            self._end(
                LinkTimeoutError(
                    f"{self.peer} has been silent for {self._silence_s:g} s; it hangs or cannot "
                    "be reached."
                )
            )
            return
        assert self._transport is not None
        if not self._has_sent and self._transport.get_write_buffer_size() == 0:
            self._transport.write(HEARTBEAT_FRAME)
        self._has_sent = False
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    # -- called by the event loop -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not an asyncio class
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    def data_received(self, data: bytes) -> None:
        self._quiet_beats = 0
        try:
            payloads = self._decoder.feed(data)
        except LinkError as error:
            self._end(error)
            return
        if payloads:
            self._payloads.extend(payloads)
            self._num_bytes += sum(map(len, payloads))
            self._arrival.set()
        if self._num_bytes > MAX_UNRECEIVED_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        reason = "" if error is None else f" ({error})"
        self._end(
            LinkClosedError(f"{self.peer} has closed the link{reason}; its process has ended.")
        )


async def open_channel(
    address: str,
    secret: str,
    hello: Hello,
    codec: Codec,
    timeout_s: float,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    silence_s: float = SILENCE_S,
    peer: str = "the engine",
    ends_when_silent: bool = True,
) -> AsyncChannel:
    """Connect, authenticate and send the `Hello`. Retries until the timeout while there is no
    listener; `timeout_s` covers all of it."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    sock = await _dial(address, timeout_s)
    try:
        async with asyncio.timeout_at(deadline_s):
            await _play(sock, dialler_script(secret, hello))
        _, channel = await loop.create_connection(
            lambda: AsyncChannel(
                codec,
                heartbeat_s=heartbeat_s,
                silence_s=silence_s,
                peer=f"{peer} at {address}",
                ends_when_silent=ends_when_silent,
            ),
            sock=sock,
        )
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise timed_out(timeout_s) from error
        raise
    return channel


async def accept_channel(
    sock: socket.socket, secret: str, codec: Codec, timeout_s: float, *, peer: str
) -> tuple[Hello, AsyncChannel]:
    """The listening side of an accepted socket, which is closed if the peer is refused."""
    loop = asyncio.get_running_loop()
    try:
        sock.setblocking(False)
        tune(sock)
        async with asyncio.timeout(timeout_s):
            hello = await _play(sock, listener_script(secret))
        _, channel = await loop.connect_accepted_socket(
            lambda: AsyncChannel(codec, heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S, peer=peer),
            sock=sock,
        )
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise timed_out(timeout_s) from error
        raise
    return hello, channel


async def _dial(address: str, timeout_s: float) -> socket.socket:
    parsed = parse(address)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                sock = await _connect(parsed)
        except OSError as error:
            check_retry(address, error, deadline_s - loop.time(), timeout_s)
        else:
            if not is_own_echo(sock):
                return sock
            sock.close()
        await asyncio.sleep(RETRY_S)


async def _connect(parsed: UnixAddress | TcpAddress) -> socket.socket:
    if isinstance(parsed, UnixAddress):
        return await _connect_to(socket.AF_UNIX, parsed.path)
    loop = asyncio.get_running_loop()
    failure: OSError = ConnectionRefusedError("the host has no address")
    for family, _, _, _, place in await loop.getaddrinfo(
        parsed.host, parsed.port, type=socket.SOCK_STREAM
    ):
        try:
            return await _connect_to(family, place)
        except OSError as error:
            failure = error
    raise failure


async def _connect_to(family: int, place: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, place)
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def _play(sock: socket.socket, script: Script[T]) -> T:
    loop = asyncio.get_running_loop()
    turn = next(script)
    while True:
        try:
            await loop.sock_sendall(sock, turn.send)
            data = b""
            while len(data) < turn.read:
                piece = await loop.sock_recv(sock, turn.read - len(data))
                if not piece:
                    raise hung_up()
                data += piece
        except ConnectionError as error:
            raise hung_up() from error
        try:
            turn = script.send(data)
        except StopIteration as finished:
            result: T = finished.value
            return result
