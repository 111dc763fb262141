"""`python -m outrider.benchmarks.hostile`: how attackers affect honest streams.

The bundled pair is served with API keys. Honest streams run alone first, then beside attackers
whose keys allow one request a minute and who mix all attacks of `attacks.py`. Compared are the gaps
between chunks, failures, restarts and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider.benchmarks.hostile.honest import HonestStats, keep_streaming
from outrider.benchmarks.hostile.report import write_report
from outrider.gateway.auth.keys_file import key_digest, new_key
from outrider.loadtest.servers.keeper import descendants
from outrider.loadtest.servers.processes import use_of

START_S = 180.0
SAMPLE_S = 5.0
_LISTENING = re.compile(r"listening on http://(\S+) and, for gRPC, on ([^\s;]+)")


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory of the server's processes, by process id."""

    at_s: float
    anonymous_mb: dict[int, float]

    @property
    def total_mb(self) -> float:
        return round(sum(self.anonymous_mb.values()), 1)


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """Latencies of the honest clients in one phase of the run, in seconds."""

    name: str
    seconds: float
    chunks: int
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    first_p50_s: float
    first_p99_s: float
    completed: int
    failures: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.benchmarks.hostile", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="under attack")
    parser.add_argument("--quiet-minutes", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--attackers", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-hostile-") as folder:
        result = asyncio.run(_run(given, Path(folder)))
    write_report(given.out, result)
    print((given.out / "report.md").read_text())


async def _run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    honest = new_key()
    hostile = [new_key() for _ in range(given.attackers)]
    entries: list[dict[str, Any]] = [{"name": "honest", "sha256": key_digest(honest).hex()}]
    entries += [
        {"name": f"attacker-{at}", "sha256": key_digest(key).hex(), "requests_per_minute": 1}
        for at, key in enumerate(hostile)
    ]
    keys_file = folder / "keys.yaml"
    keys_file.write_text(yaml.safe_dump({"keys": entries}))
    (folder / "hostile").write_text("\n".join(hostile))
    with _server(keys_file, folder / "log") as (pid, http, grpc):
        url, stats = f"http://{http}", HonestStats()
        samples: list[MemorySample] = []
        sampling = asyncio.create_task(_sample(pid, samples))
        await keep_streaming(url, honest, given.streams, 20.0, HonestStats())  # warm-up
        quiet_s = time.monotonic()
        await keep_streaming(url, honest, given.streams, 60 * given.quiet_minutes, stats)
        phases = [_phase("quiet", quiet_s, stats)]
        seconds, stats, hostile_s = 60 * given.minutes, HonestStats(), time.monotonic()
        command = [sys.executable, "-m", "outrider.benchmarks.hostile.attacks", "--http", http]
        command += ["--grpc", grpc, "--keys", str(folder / "hostile"), "--seconds", str(seconds)]
        attackers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            await keep_streaming(url, honest, given.streams, seconds, stats)
            answers, _ = await asyncio.to_thread(attackers.communicate, timeout=120)
        finally:
            attackers.kill()
        phases.append(_phase("under attack", hostile_s, stats))
        sampling.cancel()
        names = {each: _module_of(each) for each in samples[-1].anonymous_mb}
    return {
        "attackers": given.attackers,
        "streams": given.streams,
        "phases": [asdict(each) for each in phases],
        "p99_ratio": round(phases[1].gap_p99_s / phases[0].gap_p99_s, 2),
        "restarted": _num_replaced(samples),
        "answers": json.loads(answers),
        "memory": [(round(each.at_s - hostile_s, 1), each.total_mb) for each in samples],
        "memory_by_process": _by_process(samples, names, hostile_s),
        "gaps": _by_minute(stats.gaps, hostile_s),
    }


@contextlib.contextmanager
def _server(keys_file: Path, log: Path) -> Iterator[tuple[int, str, str]]:
    """The process id of `outrider serve`, and where it serves HTTP and gRPC."""
    command = [sys.executable, "-m", "outrider", "serve", "--no-ray", "--port", "0"]
    command += ["--grpc-port", "0", "--set", f"server.api_keys_file={keys_file}"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline_s = time.monotonic() + START_S
        while (found := _LISTENING.search(log.read_text(errors="replace"))) is None:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield process.pid, found[1], found[2]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


async def _sample(pid: int, samples: list[MemorySample]) -> None:
    while True:
        found = {each: use_of([each]).anonymous_mb for each in (pid, *descendants(pid))}
        samples.append(MemorySample(time.monotonic(), found))
        await asyncio.sleep(SAMPLE_S)


def _module_of(pid: int) -> str:
    """The module a process runs: the word behind `-m`."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    return next((words[at + 1] for at, word in enumerate(words[:-1]) if word == "-m"), "child")


def _by_process(
    samples: Sequence[MemorySample], names: dict[int, str], began_s: float
) -> dict[str, list[float]]:
    """MiB of each process alive at the end, at every tenth of the time under attack."""
    under = [each for each in samples if each.at_s >= began_s] or list(samples)
    chosen = [under[round(at * (len(under) - 1) / 10)] for at in range(11)]
    return {
        f"{names[pid]} {pid}": [round(each.anonymous_mb.get(pid, 0.0), 1) for each in chosen]
        for pid in names
    }


def _num_replaced(samples: Sequence[MemorySample]) -> int:
    """Long-lived processes of the first sample that are gone in the last."""
    return len(set(samples[0].anonymous_mb) - set(samples[-1].anonymous_mb))


def _phase(name: str, began_s: float, stats: HonestStats) -> PhaseSummary:
    gaps = sorted(gap for _, gap in stats.gaps)
    firsts = sorted(first for _, first in stats.firsts)
    return PhaseSummary(
        name=name,
        seconds=round(time.monotonic() - began_s, 1),
        chunks=len(gaps),
        gap_p50_s=round(statistics.median(gaps), 4),
        gap_p99_s=round(gaps[int(0.99 * (len(gaps) - 1))], 4),
        gap_max_s=round(gaps[-1], 3),
        first_p50_s=round(statistics.median(firsts), 3),
        first_p99_s=round(firsts[int(0.99 * (len(firsts) - 1))], 3),
        completed=stats.completed,
        failures=stats.failures,
    )


def _by_minute(gaps: Sequence[tuple[float, float]], began_s: float) -> list[tuple[int, float]]:
    """p99 gap of each minute."""
    minutes: dict[int, list[float]] = {}
    for at_s, gap in gaps:
        minutes.setdefault(int((at_s - began_s) // 60), []).append(gap)
    return [
        (minute, round(sorted(found)[int(0.99 * (len(found) - 1))], 4))
        for minute, found in sorted(minutes.items())
    ]


if __name__ == "__main__":
    main()
