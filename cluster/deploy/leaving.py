"""Clears a host that is about to end: asks the controller, and waits until no replica is on it. A
worker pod runs this as its preStop hook."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from outrider.links.aio import open_channel
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import NodeDrained, NodeLeaving
from outrider.links.frames import LinkError
from outrider.links.rank_messages import Hello, Role

DIAL_S = 2.0
_PAUSE_S = 0.5


async def leave(address: str, secret: str, limit_s: float, unreached_s: float) -> str:
    """Returns the outcome in words, within `limit_s`. Retries an unreachable controller for
    `unreached_s`: it may be ending and draining the replicas here."""
    hello = Hello(Role.NODE, 0, 0, os.getpid(), socket.gethostname())
    loop = asyncio.get_running_loop()
    unreached_by_s = loop.time() + min(unreached_s, limit_s)
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    channel = await open_channel(
                        address, secret, hello, FLEET_CODEC, DIAL_S, peer="the controller"
                    )
                    break
                except (LinkError, OSError) as error:
                    if loop.time() >= unreached_by_s:
                        return f"no controller was reached: {error}"
                await asyncio.sleep(_PAUSE_S)
            try:
                channel.send(NodeLeaving(own_addresses(), limit_s))
                answer = await channel.receive()
            except LinkError:
                return "the controller has ended"
            finally:
                channel.close()
    except TimeoutError:
        return f"the controller has not answered for {limit_s:g} s"
    if isinstance(answer, NodeDrained) and not answer.error:
        return "no replica is left on this host"
    return f"the controller answered: {getattr(answer, 'error', answer)}"


def own_addresses() -> tuple[str, ...]:
    """The addresses of this host's name."""
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return tuple(sorted({str(name[0]) for *_, name in infos}))
    return ()
