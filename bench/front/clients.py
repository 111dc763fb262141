"""Clients that do as little as can be done with a stream: they count its messages."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

import grpc

from outrider.client import prompt_request

PROMPT = [1000, 1001, 1002, 1003]
_GENERATE = "/outrider.v1.Generation/Generate"


@dataclass(slots=True)
class Count:
    """What one client process has seen."""

    streams: int = 0
    messages: int = 0
    failures: int = 0
    first_s: list[float] = field(default_factory=list)  # from the request to the first message


Read: TypeAlias = Callable[[Count], Awaitable[None]]
"""One stream from beginning to end."""


def grpc_reader(address: str, num_tokens: int) -> Read:
    """Over raw bytes: reading the messages is not what is measured."""
    request = prompt_request(PROMPT, max_tokens=num_tokens, ignore_eos=True).SerializeToString()
    channels = [
        grpc.aio.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),))
        for _ in range(8)
    ]
    calls = [channel.unary_stream(_GENERATE) for channel in channels]
    turn = iter(range(10**9))

    async def read(count: Count) -> None:
        began_s = time.monotonic()
        is_first = True
        call = calls[next(turn) % len(calls)](request)
        while await call.read() is not grpc.aio.EOF:
            count.messages += 1
            if is_first:
                count.first_s.append(time.monotonic() - began_s)
                is_first = False

    return read


def http_reader(address: str, num_tokens: int) -> Read:
    host, _, port = address.rpartition(":")
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )

    async def read(count: Count) -> None:
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + body)
            is_first = True
            tail = b""
            while data := await reader.read(2**16):
                found = data.count(b"data: {")
                count.messages += found
                if is_first and found:
                    count.first_s.append(time.monotonic() - began_s)
                    is_first = False
                tail = (tail + data)[-64:]
            if b"[DONE]" not in tail:
                raise OSError("the stream ended before its end")
        finally:
            writer.close()

    return read


READERS = {"grpc": grpc_reader, "http": http_reader}


async def _run(read: Read, num_streams: int, seconds: float) -> Count:
    """So many readers, each with one stream after the other, and nothing counted after the end."""
    count = Count()
    end_s = time.monotonic() + seconds

    async def reader() -> None:
        while time.monotonic() < end_s:
            try:
                await read(count)
            except (grpc.RpcError, OSError):
                count.failures += 1
                await asyncio.sleep(0.05)
            else:
                count.streams += 1

    await asyncio.gather(*(reader() for _ in range(num_streams)))
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", choices=tuple(READERS), required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args(arguments)

    async def run() -> Count:
        read = READERS[given.protocol](given.address, given.tokens)
        return await _run(read, given.streams, given.seconds)

    print(json.dumps(asdict(asyncio.run(run()))))


if __name__ == "__main__":
    main()
