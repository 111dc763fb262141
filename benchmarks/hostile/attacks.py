"""Hostile clients: each attack is bounded in time, uses loopback only, and counts the answers.

`python -m outrider.benchmarks.hostile` starts it. Each key of the file is one attacker that repeats
the attacks in random order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc

BODY_BYTES = 4 * 2**20 - 4096
ATTACK_S = 15.0  # of one attack, at most
NICE = 19  # real attackers have their own machine; these share the server's cores
_TOKENIZE = "/outrider.v1.Generation/Tokenize"
_GENERATE = "/outrider.v1.Generation/GenerateOnce"


@dataclass(slots=True)
class Attacker:
    """One API key, the addresses it attacks, and its answers by attack."""

    http: tuple[str, int]
    grpc_address: str
    key: str
    answers: Counter[str] = field(default_factory=Counter)

    async def post(self, path: str, body: bytes, *, held_back: int = 0) -> str:
        """Status of the answer. The last `held_back` bytes are never sent."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self.send(head.encode() + body[: len(body) - held_back])

    async def send(self, data: bytes) -> str:
        """Status of the answer to raw bytes; "closed" without an answer."""
        try:
            reader, writer = await asyncio.open_connection(*self.http)
        except OSError:
            return "refused"
        try:
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
            line = await reader.readline()
            return line.split(b" ")[1].decode() if line.count(b" ") > 1 else "closed"
        except (OSError, ValueError):
            return "closed"
        finally:
            writer.close()

    async def call(self, method: str, message: bytes, *, timeout_s: float = ATTACK_S) -> str:
        """Status of one gRPC call, on a new channel."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.grpc_address, options=options) as channel:
            call = channel.unary_unary(method)(
                message, timeout=timeout_s, metadata=(("authorization", f"Bearer {self.key}"),)
            )
            try:
                await call
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
        return "OK"


@cache
def _empty_messages() -> bytes:
    """A TokenizeRequest with two million empty chat messages."""
    inner = b"\x0a\x00" * (BODY_BYTES // 2)
    return b"\x1a" + _varint(len(inner)) + inner  # field 3, chat


@cache
def _large_text() -> bytes:
    return b"\x52" + _varint(BODY_BYTES) + b"a" * BODY_BYTES  # field 10, text


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


@cache
def _nested() -> bytes:
    return b'{"messages":[' + b"[]," * (BODY_BYTES // 3 - 16) + b"[]]}"


@cache
def _unused_fields() -> bytes:
    junk = ",".join(f'"k{number}":[{number}]' for number in range(BODY_BYTES // 20))
    return f'{{"messages":[{{"role":"user","content":"Hi",{junk}}}],"max_tokens":1}}'.encode()


def _chat(**options: object) -> bytes:
    message = {"role": "user", "content": "Count to one hundred."}
    return json.dumps({"messages": [message], "max_tokens": 64, **options}).encode()


async def grpc_empty_messages(of: Attacker) -> None:
    of.answers["grpc tokenize " + await of.call(_TOKENIZE, _empty_messages())] += 1


async def grpc_large_calls(of: Attacker) -> None:
    answers = await asyncio.gather(*(of.call(_GENERATE, _large_text()) for _ in range(8)))
    of.answers.update(f"grpc large {each}" for each in answers)


async def json_bomb(of: Attacker) -> None:
    path = random.choice(("/v1/chat/completions", "/v1/completions", "/tokenize"))
    of.answers["json " + await of.post(path, _nested())] += 1


async def speculation_bomb(of: Attacker) -> None:
    of.answers["speculation " + await of.post("/outrider/speculation", _nested())] += 1


async def unused_fields(of: Attacker) -> None:
    of.answers["unused " + await of.post("/v1/chat/completions", _unused_fields())] += 1


async def stalled_bodies(of: Attacker) -> None:
    body = _chat(padding="x" * BODY_BYTES)
    tasks = [
        asyncio.create_task(of.post("/v1/chat/completions", body, held_back=1)) for _ in range(8)
    ]
    await _answered(of, "stalled", tasks)


async def priority_flood(of: Attacker) -> None:
    body = _chat(priority=-100, n=4)
    tasks = [asyncio.create_task(of.post("/v1/chat/completions", body)) for _ in range(24)]
    await _answered(of, "priority", tasks)


async def idle_connections(of: Attacker) -> None:
    """Idle unauthenticated connections to both ports."""
    host, port = of.grpc_address.rsplit(":", 1)
    opened = []
    for number in range(64):
        with contextlib.suppress(OSError):
            where = of.http if number % 2 else (host, int(port))
            opened.append(await asyncio.open_connection(*where))
    of.answers["idle opened"] += len(opened)
    await asyncio.sleep(ATTACK_S)
    for _, writer in opened:
        writer.close()


async def guess_prompts(of: Attacker) -> None:
    body = _chat(max_tokens=1, cache_salt="guess")
    of.answers["guess " + await of.post("/v1/chat/completions", body)] += 1


async def wrong_types(of: Attacker) -> None:
    values: tuple[object, ...] = (1, True, "x", {}, [[]])
    for value in values:
        body = _chat(allowed_token_ids=value)
        of.answers["types " + await of.post("/v1/chat/completions", body)] += 1


async def huge_headers(of: Attacker) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 120_000 + b"\r\n\r\n"
    of.answers["headers " + await of.send(head)] += 1


ATTACKS: tuple[Callable[[Attacker], Awaitable[None]], ...] = (
    *(grpc_empty_messages, grpc_large_calls, json_bomb, speculation_bomb, unused_fields),
    *(stalled_bodies, priority_flood, idle_connections, guess_prompts, wrong_types, huge_headers),
)


async def _answered(of: Attacker, name: str, tasks: list[asyncio.Task[str]]) -> None:
    done, late = await asyncio.wait(tasks, timeout=ATTACK_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    of.answers.update(f"{name} {task.result()}" for task in done)
    of.answers[f"{name} unanswered"] += len(late)


async def attack(of: Attacker, seconds: float, seed: int) -> None:
    """Attacks in random order until the time is up."""
    order, end_s = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end_s:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(2 * ATTACK_S):
                await order.choice(ATTACKS)(of)
        await asyncio.sleep(order.random())


async def _run(given: argparse.Namespace) -> Counter[str]:
    host, port = given.http.rsplit(":", 1)
    keys = given.keys.read_text().split()
    attackers = [Attacker((host, int(port)), given.grpc, key) for key in keys]
    await asyncio.gather(
        *(attack(each, given.seconds, seed) for seed, each in enumerate(attackers))
    )
    return sum((each.answers for each in attackers), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--keys", type=Path, required=True, help="a key a line")
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    os.nice(NICE)
    print(json.dumps(asyncio.run(_run(given))))


if __name__ == "__main__":
    main()
