"""A client that asks for much and reads nothing of it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from outrider.gateway.connection_slots import ConnectionSlots
from outrider.gateway.http.connections import BoundedProtocol, ConnectionBounds
from outrider.gateway.http.pieces import SendInPieces

PIECE = b"x" * 2**16


async def endless(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await asyncio.sleep(0)


def test_is_cut_off_after_a_while_and_others_are_not() -> None:
    bounds = ConnectionBounds(1024, header_timeout_s=5.0, write_timeout_s=0.3)
    config = uvicorn.Config(endless, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    slots = ConnectionSlots(8)

    def protocol() -> BoundedProtocol:
        slot = slots.take("127.0.0.1", lambda: None)
        return BoundedProtocol(config, state, bounds=bounds, slot=slot)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        with (
            socket.create_connection(address, 5) as idle,
            socket.create_connection(address) as busy,
        ):
            for each in (idle, busy):
                each.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                each.setblocking(False)
            async with asyncio.timeout(10):
                while len(state.connections) < 2:
                    await asyncio.sleep(0.01)
                while len(state.connections) > 1:  # the one that reads
                    await loop.sock_recv(busy, 2**20)
                for _ in range(100):
                    await loop.sock_recv(busy, 2**20)
            assert len(state.connections) == 1
        server.close()
        for task in state.tasks:
            task.cancel()

    asyncio.run(run())


def test_one_that_reads_slowly_but_steadily_gets_all_of_it() -> None:
    size = 3 * 2**20

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size})

    bounds = ConnectionBounds(1024, header_timeout_s=5.0, write_timeout_s=1.0)
    config = uvicorn.Config(SendInPieces(whole), ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    slots = ConnectionSlots(8)

    def protocol() -> BoundedProtocol:
        slot = slots.take("127.0.0.1", lambda: None)
        return BoundedProtocol(config, state, bounds=bounds, slot=slot)

    async def run() -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, "127.0.0.1", 0)
        server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
            slow.setblocking(False)
            await loop.sock_connect(slow, server.sockets[0].getsockname())
            await loop.sock_sendall(slow, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            received = 0
            while data := await loop.sock_recv(slow, 2**16):
                received += data.count(b"x")
                await asyncio.sleep(0.02)  # so all of it takes a multiple of the time limit
        server.close()
        return received

    assert asyncio.run(run()) == size
