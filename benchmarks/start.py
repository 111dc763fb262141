"""Where the time of a server's start goes, with a cold and with a warm cache.

    python -m outrider.benchmarks.start [--tree before=FOLDER --tree after=FOLDER] [--times 3]

A server of the bundled pair is started with an empty cache folder (cold), then with the cache of
that start (warm). Its log lines give the end of each stage; processor seconds are those of its
processes until it is ready, compilers included, and the steadier figure on a busy machine. Servers
of several trees take turns.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.errors import OutriderError

WAYS = {"Ray": "", "no Ray": "--no-ray"}
_LIMIT_S = 600.0
# The log lines that end a stage, in any order, and the stages' names here.
STAGES = {
    r"models and tokenizers checked": "models checked",
    r"Ray started": "Ray started",
    r"target: 1 of 1 ranks up": "ranks up",
    r"target rank 0: weights loaded": "weights loaded",
    r"draft joined": "passes timed, draft joined",
    r"listening on": "listening",
}
_LINE = re.compile(r" *(?P<seconds>[\d.]+) s  (?P<words>.*)")
_READY = re.compile(r"ready in (?P<seconds>[\d.]+) s")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the first line to the end of each stage, and processor seconds."""

    stages: dict[str, float]
    ready_s: float
    processor_s: float
    kept_mb: float  # in the cache folder


def stages_of(lines: Iterable[str]) -> tuple[dict[str, float], float]:
    """When each stage ended and when the server was ready, from its log lines."""
    found: dict[str, float] = {}
    for line in lines:
        if ready := _READY.match(line):
            return found, float(ready["seconds"])
        if logged := _LINE.match(line):
            for pattern, name in STAGES.items():
                if re.match(pattern, logged["words"]):
                    found[name] = float(logged["seconds"])
    raise OutriderError("the server ended before it was ready.")


def measure(source: Path, way: str, cache: Path) -> Start:
    command = [sys.executable, "-m", "outrider", "serve", *shlex.split(WAYS[way])]
    environment = os.environ | {"OUTRIDER_CACHE": str(cache), "PYTHONPATH": str(source / "src")}
    server = subprocess.Popen(
        [*command, "--port", "0", "--grpc-port", "0"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        stages, ready_s = stages_of(server.stderr)
        used_s = processor_s(server.pid)
        kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        return Start(stages, ready_s, used_s, kept / 1e6)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=_LIMIT_S)


def processor_s(pid: int) -> float:
    """Processor seconds of a process and its descendants, ended ones included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        own = int(stat.parent.name)
        parents[own], ticks[own] = int(fields[1]), sum(map(int, fields[11:15]))
    below = [pid]
    for each in below:
        below += [child for child, parent in parents.items() if parent == each]
    return sum(ticks.get(each, 0) for each in below) / os.sysconf("SC_CLK_TCK")


def table(starts: dict[str, list[Start]]) -> str:
    """Medians, a column for each kind of start."""
    names = [name for name in STAGES.values() if any(name in s.stages for s in _all(starts))]
    rows = [("", list(starts))]
    for name in names:
        rows.append((name, [_median(s.stages.get(name) for s in own) for own in starts.values()]))
    rows.append(("ready", [_median(s.ready_s for s in own) for own in starts.values()]))
    rows.append(
        ("processor seconds", [_median(s.processor_s for s in own) for own in starts.values()])
    )
    rows.append(("MB kept", [_median(s.kept_mb for s in own) for own in starts.values()]))
    lines = [f"| {' | '.join([name, *cells])} |" for name, cells in rows]
    return "\n".join([lines[0], f"|---|{'---:|' * len(starts)}", *lines[1:]])


def _all(starts: dict[str, list[Start]]) -> list[Start]:
    return [start for own in starts.values() for start in own]


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else ""


def run(trees: Sequence[str], ways: Sequence[str], times: int) -> dict[str, list[Start]]:
    starts: dict[str, list[Start]] = {}
    for _ in range(times):
        for way in ways:
            for tree in trees:
                name, _, folder = tree.rpartition("=")
                with tempfile.TemporaryDirectory() as cache:
                    for kind in ("cold", "warm"):
                        start = measure(Path(folder).resolve(), way, Path(cache))
                        column = f"{name} {way}, {kind}".strip()
                        starts.setdefault(column, []).append(start)
                        typer.echo(f"{column}: {start.ready_s:.1f} s", err=True)
    return starts


def main(
    tree: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of a checkout. Default: this one.")
    ] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}.")] = None,
    times: Annotated[int, typer.Option(help="Starts of each kind.", min=1)] = 3,
) -> None:
    """Start servers and print a table of the stages' times."""
    own = str(Path(__file__).resolve().parents[1])
    try:
        typer.echo(table(run(tree or [own], way or list(WAYS), times)))
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


if __name__ == "__main__":
    typer.run(main)
