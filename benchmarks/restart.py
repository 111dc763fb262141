"""The recovery time of a server after one of its processes is killed.

    python -m outrider.benchmarks.restart [--tree before=FOLDER --tree after=FOLDER] [--json FILE]

A server of the bundled pair answers one request after another, of 64 tokens each, so that little
text is recomputed. Its draft, target and engine are killed in turn (SIGKILL), 20 s after the last
recovery, when a standby is ready again. `flows_s` is the time from the kill to the end of the
longest gap in the stream, `drafted_s` to the first accepted draft of the new processes. Servers of
several trees take turns, so that noise of the machine affects all of them alike.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.client import AsyncClient
from outrider.errors import OutriderError
from outrider.loadtest.servers.chaos import ServerProcess, processes_of
from outrider.loadtest.servers.chaos_file import ROLES, ChaosTarget
from outrider.loadtest.servers.server import ServerSpec, ServerUnderTest

WAYS = {
    "Ray": "",
    "no Ray": "--no-ray",
    "no Ray, one process": "--no-ray --set cluster.colocate=true",
}
BACK_S = 120.0
_PROMPT = "Once upon a time there was a"
_POLL_S = 0.1
_CALM_S = 20.0  # of drafted tokens before the next kill


@dataclass(frozen=True, slots=True)
class Kill:
    """One killed process, or the start of a server, where none was killed."""

    tree: str
    way: str
    killed: str
    flows_s: float
    drafted_s: float


@dataclass(frozen=True, slots=True)
class ChunkArrival:
    """When a chunk of tokens arrived, on the client's clock."""

    at_s: float
    is_drafted: bool


class Reader:
    """Streams one request after another, and records when chunks arrive."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.arrivals: list[ChunkArrival] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            stream = self._client.stream(
                _PROMPT, temperature=0.0, max_tokens=64, ignore_eos=True, timeout_s=600
            )
            async for chunk in stream:
                if chunk.token_ids:
                    drafted = any(origin != "target" for origin in chunk.origins)
                    self.arrivals.append(ChunkArrival(time.monotonic(), drafted))

    async def wait_drafted(self, after_s: float) -> float:
        """When the first drafted tokens after `after_s` arrived."""
        deadline_s = time.monotonic() + BACK_S
        while time.monotonic() < deadline_s:
            for arrival in self.arrivals:
                if arrival.at_s > after_s and arrival.is_drafted:
                    return arrival.at_s
            await asyncio.sleep(_POLL_S / 4)
        raise OutriderError(f"nothing was drafted again within {BACK_S:g} s.")

    def end_of_longest_gap(self, from_s: float, until_s: float) -> float:
        inside = [a.at_s for a in self.arrivals if from_s < a.at_s <= until_s]
        gaps = zip([from_s, *inside[:-1]], inside, strict=True)
        return max(gaps, key=lambda pair: pair[1] - pair[0])[1]


async def measure(tree: str, source: Path, way: str, roles: Sequence[str]) -> list[Kill]:
    """Start the server of a tree, kill its processes one after the other, and stop it."""
    command = [sys.executable, "-m", "outrider", "serve", *shlex.split(WAYS[way])]
    command += ["--port", "0", "--grpc-port", "{port}", "--policy", "fixed"]
    spec = ServerSpec(
        f"{tree} {way}",
        "grpc://127.0.0.1:{port}",
        shlex.join(command),
        env={"PYTHONPATH": str(source / "src")},
        cwd=source,
    )
    with tempfile.TemporaryDirectory() as folder:
        server = ServerUnderTest(spec, Path(folder))
        start_s = time.monotonic()
        await server.start()
        try:
            ready_s = time.monotonic() - start_s
            async with AsyncClient(server.url.removeprefix("grpc://")) as client:
                reader = Reader(client)
                reading = asyncio.create_task(reader.run())
                drafted_s = await reader.wait_drafted(start_s) - start_s
                kills = [Kill(tree, way, "(start)", ready_s, drafted_s)]
                for role in roles:
                    kills.append(await _kill(tree, way, role, server, client, reader))
                    print(kills[-1], file=sys.stderr, flush=True)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        finally:
            await server.stop()
    return kills


async def _kill(
    tree: str, way: str, role: str, server: ServerUnderTest, client: AsyncClient, reader: Reader
) -> Kill:
    await asyncio.sleep(_CALM_S)
    before = await _find(role, server, client)
    killed_s = time.monotonic()
    for member in before:
        os.kill(member.pid, signal.SIGKILL)
    lost = {member.pid for member in before}
    await _find(role, server, client, lambda m: m.is_ready and m.pid not in lost)
    # Tokens drafted by the killed process may still be in flight for a moment; a new draft
    # proposes nothing before it is ready.
    ready_s = killed_s + 1.0 if role != "draft" else time.monotonic() - 2 * _POLL_S
    drafted_s = await reader.wait_drafted(ready_s)
    flows_s = reader.end_of_longest_gap(killed_s, drafted_s)
    return Kill(tree, way, role, flows_s - killed_s, drafted_s - killed_s)


async def _find(
    role: str,
    server: ServerUnderTest,
    client: AsyncClient,
    matches: Callable[[ServerProcess], bool] = lambda member: True,
) -> list[ServerProcess]:
    deadline_s = time.monotonic() + BACK_S
    while time.monotonic() < deadline_s:
        try:
            members = processes_of(await client.status(), ChaosTarget(role), server.pids())
        except OutriderError:  # the gateway is down itself
            members = []
        if found := [member for member in members if matches(member)]:
            return found
        await asyncio.sleep(_POLL_S)
    raise OutriderError(f"the server had no {role} within {BACK_S:g} s.")


def medians(kills: Sequence[Kill]) -> list[Kill]:
    """Medians of each way, process and tree, sorted."""
    groups: dict[tuple[str, str, str], list[Kill]] = {}
    for kill in kills:
        groups.setdefault((kill.way, kill.killed, kill.tree), []).append(kill)
    return [
        Kill(
            tree,
            way,
            killed,
            round(statistics.median(each.flows_s for each in group), 2),
            round(statistics.median(each.drafted_s for each in group), 2),
        )
        for (way, killed, tree), group in sorted(groups.items())
    ]


def main(
    tree: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of a checkout; may be repeated.")
    ] = None,
    ways: Annotated[
        str, typer.Option(help=f"Of {'; '.join(WAYS)}, with semicolons.")
    ] = "Ray;no Ray",
    kill: Annotated[str, typer.Option(help="Roles to kill, with commas.")] = ",".join(ROLES),
    rounds: Annotated[int, typer.Option(help="Turns through all trees and ways.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all of them here.")
    ] = None,
) -> None:
    """Kill processes of servers and time until they serve again."""
    trees = dict(each.split("=", 1) for each in tree or [f"here={Path.cwd()}"])
    kills: list[Kill] = []
    for _ in range(rounds):
        for way in ways.split(";"):
            roles = ["engine"] if "one process" in way else kill.split(",")
            for name, folder in trees.items():
                kills += asyncio.run(measure(name, Path(folder).resolve(), way, roles))
    named = f"{'way':<20} {'killed':<8} {'tree':<8}"
    print(f"{named} tokens again  drafted again   (seconds, medians)")
    for row in medians(kills):
        named = f"{row.way:<20} {row.killed:<8} {row.tree:<8}"
        print(f"{named} {row.flows_s:>12.2f}  {row.drafted_s:>13.2f}")
    if json_file is not None:
        result = {
            "command": "python -m outrider.benchmarks.restart",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "kills": [asdict(each) for each in kills],
        }
        json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
