"""The instrument measured: `python -m outrider.bench.load.proof`, in under five minutes.

Servers do what a script says and keep books of it; what the clients say is held against that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from outrider.bench.load.arrivals import Constant, Poisson
from outrider.bench.load.asks import Prompt
from outrider.bench.load.clients.shifts import Asking, Load
from outrider.bench.load.conductor import CLIENTS, Conductor
from outrider.bench.load.dashboard import PlainView
from outrider.bench.load.plan import Arm, Plan, Timing
from outrider.bench.load.records import Outcome, RequestRecord
from outrider.bench.load.runs import Run, ShiftRecord
from outrider.bench.load.servers.server import ServerSpec
from outrider.bench.load.targets.base import TargetSpec

RATES = (500, 1000, 1500, 2000, 2500, 3000)
ON_TIME_MS = 10.0
AGREES_MS, AGREES_SHARE = 2.0, 0.02
STALL_S = 2.0
PERCENTILES = (50, 90, 99)
_FAKE = "-m outrider.bench.load.fake"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Seconds of each part."""

    latency_s: float = 25.0
    rate_s: float = 5.0
    events_s: float = 6.0
    memory_s: float = 60.0
    rates: tuple[int, ...] = RATES


QUICK = Lengths(latency_s=3.0, rate_s=1.0, events_s=1.0, memory_s=3.0, rates=(200, 400))


@dataclass(slots=True)
class Measured:
    """One shift against a scripted server, with that server's books."""

    shift: ShiftRecord
    records: list[RequestRecord]
    served: dict[str, dict[str, Any]]
    client_mb: list[float] = field(default_factory=list)

    @property
    def ok(self) -> list[RequestRecord]:
        return [record for record in self.records if record.outcome is Outcome.OK]


class _Silent(PlainView):
    def say(self, text: str) -> None:
        return


def measure(
    script: str,
    load: Load,
    seconds: float,
    *,
    scheme: str = "http",
    processes: int = 1,
    max_tokens: int = 64,
    max_in_flight: int | None = None,
    prompts: int = 20_000,
) -> Measured:
    """One shift through conductor, client processes and a server of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        books = folder / "books"
        command = (
            f"{shlex.quote(sys.executable)} {_FAKE} --{scheme} {{port}} --books {books} {script}"
        )
        server = ServerSpec("fake", f"{scheme}://127.0.0.1:{{port}}", command)
        pool = [Prompt(f"p{n}", "proof", turns=(f"say p{n}",)) for n in range(prompts)]
        plan = Plan(
            arms=(Arm("fake", server, TargetSpec("")),),
            loads=(load,),
            pool=pool,
            prompts="numbered",
            is_natural=False,
            remarks=(),
            asking=Asking(max_tokens=max_tokens),
            timing=Timing(seconds, 0.0, 0.0, timeout_s=20.0, drain_s=20.0),
            client_processes=processes,
            max_in_flight=max_in_flight,
        )
        run = Run(folder)
        asyncio.run(_conduct(plan, run))
        [shift] = run.shifts()
        rows = map(json.loads, books.with_suffix(f".{scheme}.jsonl").read_text().splitlines())
        samples = (sample for sample in run.samples() if sample.server == CLIENTS)
        return Measured(
            shift,
            list(run.requests()),
            {row["prompt"]: row for row in rows},
            [sample.memory_mb for sample in samples if sample.memory_mb is not None],
        )


async def _conduct(plan: Plan, run: Run) -> None:
    async with Conductor(plan, run, _Silent(Console(stderr=True))).open() as conductor:
        await conductor.run_plan()


def open_load(rate: float, prompts: int = 20_000, *, is_even: bool = False) -> Load:
    arrivals = Constant(rate) if is_even else Poisson(rate)
    return Load(f"rate {rate:g}", "rate", rate, arrivals=arrivals, places=(0, prompts))


def closed_load(clients: int, prompts: int = 20_000) -> Load:
    return Load(f"clients {clients}", "clients", clients, clients=clients, places=(0, prompts))


def agreement(lengths: Lengths) -> Iterator[dict[str, Any]]:
    """Percentiles of the clients beside those of the server's books, request by request."""
    scripts = {
        "constant": "--ttft 50ms --gap 10ms --updates 16",
        "lognormal": "--ttft 50ms --gap 10ms --updates 16 --jitter lognormal --spread 0.5",
    }
    for name, script in scripts.items():
        measured = measure(script, open_load(40), lengths.latency_s)
        books = [measured.served["say " + r.id.removesuffix("#0")] for r in measured.ok]
        pairs = {
            "ttft": (
                [(r.first_s or r.end_s) - r.sent_s for r in measured.ok],
                [book["first_s"] - book["received_s"] for book in books],
            ),
            "e2e": (
                [r.end_s - r.sent_s for r in measured.ok],
                [book["last_s"] - book["received_s"] for book in books],
            ),
        }
        for quantity, (ours, theirs) in pairs.items():
            for percent in PERCENTILES:
                mine, his = (float(np.percentile(each, percent)) * 1e3 for each in (ours, theirs))
                limit = max(AGREES_MS, AGREES_SHARE * his)
                yield {
                    "delays": name,
                    "quantity": f"{quantity} p{percent}",
                    "requests": len(books),
                    "client_ms": round(mine, 3),
                    "server_ms": round(his, 3),
                    "differs_ms": round(mine - his, 3),
                    "agrees": abs(mine - his) <= limit,
                }


def stall(lengths: Lengths) -> dict[str, Any]:
    """A server that stops for two seconds, seen from both times."""
    script = f"--ttft 5ms --updates 1 --stall 500ms {STALL_S:g}s"
    seconds = max(lengths.rate_s, 4.0)
    measured = measure(script, open_load(50, is_even=True), seconds, max_in_flight=2)
    return {
        "stall_s": STALL_S,
        "requests": len(measured.ok),
        "p90_from_intended_ms": _p90_ms(measured, lambda r: r.end_s - r.intended_s),
        "p90_from_sent_ms": _p90_ms(measured, lambda r: r.end_s - r.sent_s),
    }


def _p90_ms(measured: Measured, seconds: Callable[[RequestRecord], float]) -> float:
    return round(float(np.percentile([seconds(r) for r in measured.ok], 90)) * 1e3, 1)


def on_time(lengths: Lengths) -> Iterator[dict[str, Any]]:
    """How many requests a second leave when they are due."""
    for processes in (1, 2):
        for rate in lengths.rates:
            measured = measure("--updates 4", open_load(rate), lengths.rate_s, processes=processes)
            lag_ms = measured.shift.send_lag_p99_ms
            yield {
                "processes": processes,
                "rate": rate,
                "sent": len(measured.records),
                "failed": len(measured.records) - len(measured.ok),
                "send_lag_p99_ms": round(lag_ms, 2),
                "is_on_time": lag_ms < ON_TIME_MS,
            }
            if lag_ms > 20 * ON_TIME_MS:
                break  # higher rates are hopeless, and slow to end


def events(lengths: Lengths) -> Iterator[dict[str, Any]]:
    """How many updates a second a client reads, one server process sending them."""
    script = "--gap 1ms --updates 0"
    for scheme, clients in (("http", 32), ("grpc", 16)):
        measured = measure(
            script, closed_load(clients), lengths.events_s, scheme=scheme, max_tokens=512
        )
        seconds = measured.shift.end_s - measured.shift.start_s
        total = sum(len(record.update_s) for record in measured.records)
        yield {
            "scheme": scheme,
            "clients": clients,
            "updates_per_s": round(total / seconds),
            "client_cpu": round(measured.shift.client_cpu_s / seconds, 2),
            "loop_delay_p99_ms": round(measured.shift.loop_delay_p99_ms, 2),
        }


def memory(lengths: Lengths) -> dict[str, Any]:
    """What the client holds while requests come and go."""
    rate = lengths.rates[1]
    measured = measure("--updates 4", open_load(rate), lengths.memory_s)
    samples = measured.client_mb
    return {
        "rate": rate,
        "seconds": lengths.memory_s,
        "requests": len(measured.records),
        "first_mb": round(samples[0], 1) if samples else None,
        "last_mb": round(samples[-1], 1) if samples else None,
    }


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    shown = Table(title=title, title_justify="left", box=None)
    for name in rows[0]:
        shown.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*(str(value) for value in row.values()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.load.proof")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    options = parser.parse_args()
    lengths = QUICK if options.quick else Lengths()
    console = Console()
    parts: dict[str, tuple[str, Callable[[Lengths], Any]]] = {
        "agreement": ("Latencies, client and server's own books", agreement),
        "stall": ("A stall of two seconds", stall),
        "on_time": (f"Sent on time (p99 within {ON_TIME_MS:g} ms)", on_time),
        "events": ("Updates read a second", events),
        "memory": ("Memory of the client", memory),
    }
    result: dict[str, Any] = {
        "machine": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "is_quick": options.quick,
    }
    for name, (title, part) in parts.items():
        got = part(lengths)
        rows = [got] if isinstance(got, dict) else list(got)
        result[name] = rows
        console.print(table(title, rows), "")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not all(row["agrees"] for row in result["agreement"]):
        sys.exit(f"error: latencies differ by more than {AGREES_MS:g} ms and {AGREES_SHARE:.0%}.")


if __name__ == "__main__":
    main()
