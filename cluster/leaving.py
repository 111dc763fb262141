"""A host that is about to end tells the controller of its cluster, and waits until no replica is on
it: what a worker pod runs before it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from outrider.links.aio import open_channel
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import Leaving, Left
from outrider.links.frames import LinkError
from outrider.links.rank_messages import Hello, Role

DIAL_S = 2.0
_PAUSE_S = 0.5


async def leave(address: str, secret: str, limit_s: float, unreached_s: float) -> str:
    """Returns what has become of it, by `limit_s` at the latest. A controller that is not reached
    may be ending, with replicas here that it drains: it is given `unreached_s`."""
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
                channel.send(Leaving(own_addresses(), limit_s))
                answer = await channel.receive()
            except LinkError:
                return "the controller has ended"
            finally:
                channel.close()
    except TimeoutError:
        return f"the controller has not answered for {limit_s:g} s"
    if isinstance(answer, Left) and not answer.error:
        return "no replica is here any more"
    return f"the controller answered: {getattr(answer, 'error', answer)}"


def own_addresses() -> tuple[str, ...]:
    """That the name of this host stands for."""
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return tuple(sorted({str(name[0]) for *_, name in infos}))
    return ()
