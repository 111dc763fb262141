"""How processes end, and what they wrote last."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.cluster.own_log import OwnLog, last_lines
from outrider.cluster.ray_facts import own_node_id

_LOG_TIMEOUT_S = 10.0
_VANISHED = "its process ended without a word (killed, out of memory or crashed)"


class End(NamedTuple):
    """The end of a process's work. `reason` is None if it was told to end, or had nobody left to
    work for."""

    name: str
    at_s: float
    reason: str | None
    is_vanished: bool


async def await_end(name: str, run: Any) -> End:
    """Wait for the call of an actor's `run` to end in any way."""
    reason, is_vanished = None, False
    try:
        await run
    except RayTaskError as error:
        reason = str(error.cause) or type(error.cause).__name__
    except RayActorError:
        reason, is_vanished = _VANISHED, True
    except RayError as error:
        reason = str(error)
    return End(name, time.monotonic(), reason, is_vanished)


def root_cause(ends: Iterable[End]) -> End | None:
    """The one that may have brought the others down: who vanished said nothing to anybody, and of
    those who gave a reason the first did not merely miss another."""
    blamed = [end for end in ends if end.reason is not None]
    return min(blamed, key=lambda end: (not end.is_vanished, end.at_s), default=None)


async def read_last_lines(node_id: str, log: OwnLog) -> list[str]:
    """The end of a process's log, read where it is."""
    if node_id == own_node_id():
        return last_lines(log)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    read: Any = ray.remote(last_lines)
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(_LOG_TIMEOUT_S):
            return list(await read.options(num_cpus=0, scheduling_strategy=there).remote(log))
    return [f"{log.path} on node {node_id} cannot be read"]
