"""Why processes ended, and their last log lines, from logs that survive a crash."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from outrider.cluster.errors import ClusterError
from outrider.cluster.ray.facts import logs_folder, own_node_id
from outrider.logs import last_lines
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LOG_TIMEOUT_S = 10.0
_VANISHED = "its process ended without an error message (killed, out of memory or crashed)"


@dataclass(frozen=True, slots=True)
class OwnLog:
    """A log file, and the offset at which a process began to write."""

    path: str
    start: int


def redirect_output(name: str) -> OwnLog:
    """Redirect stdout and stderr, of C code too, to a file of its own in Ray's log folder.
    Unbuffered: a kill loses nothing."""
    path = logs_folder() / f"outrider-{name}.log"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ClusterError(
            f"the log {path} cannot be written: {error.strerror}; remove it; symlinks are refused."
        ) from error
    log = OwnLog(str(path), os.fstat(file).st_size)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(file=2)
    return log


class End(NamedTuple):
    """The end of a process. `reason` is None if it was stopped, or its peer was gone."""

    name: str
    at_s: float
    reason: str | None
    is_vanished: bool


async def await_end(name: str, run: Any) -> End:
    """Wait for an actor's `run` to end, in any way."""
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
    """The end that probably caused the others: a vanished process first, else the earliest
    reason."""
    blamed = [end for end in ends if end.reason is not None]
    return min(blamed, key=lambda end: (not end.is_vanished, end.at_s), default=None)


async def read_last_lines(node_id: str, log: OwnLog) -> list[str]:
    """The last lines of a process's log, read on its node."""
    if node_id == own_node_id():
        return last_lines(log.path, log.start)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    read: Any = ray.remote(last_lines)
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(_LOG_TIMEOUT_S):
            found = read.options(num_cpus=0, scheduling_strategy=there).remote(log.path, log.start)
            return list(await found)
    return [f"{log.path} on node {node_id} cannot be read"]
