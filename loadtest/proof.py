"""Validates the harness itself: `python -m outrider.loadtest.proof`, in under five minutes.

Compares the clients' measurements with the request logs of scripted servers.
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

from outrider.loadtest.arrivals import Constant, Poisson
from outrider.loadtest.clients.shifts import LoadSpec, RequestOptions
from outrider.loadtest.conductor import CLIENTS, Conductor
from outrider.loadtest.dashboard import PlainView
from outrider.loadtest.plan import ArmSpec, RunPlan, Timing
from outrider.loadtest.records import RequestOutcome, RequestRecord
from outrider.loadtest.requests import Prompt
from outrider.loadtest.runs import RunFolder, ShiftRecord
from outrider.loadtest.servers.server import ServerSpec
from outrider.loadtest.targets.base import TargetSpec

RATES = (500, 1000, 1500, 2000, 2500, 3000)
ON_TIME_MS = 10.0
AGREES_MS, AGREES_SHARE = 2.0, 0.02
STALL_S = 2.0
PERCENTILES = (50, 90, 99)
_FAKE = "-m outrider.loadtest.fake"


@dataclass(frozen=True, slots=True)
class StageDurations:
    """Duration of each check."""

    latency_s: float = 25.0
    rate_s: float = 5.0
    events_s: float = 6.0
    memory_s: float = 60.0
    rates: tuple[int, ...] = RATES


QUICK = StageDurations(latency_s=3.0, rate_s=1.0, events_s=1.0, memory_s=3.0, rates=(200, 400))


@dataclass(slots=True)
class MeasuredShift:
    """One shift against a scripted server, with the server's request log."""

    shift: ShiftRecord
    records: list[RequestRecord]
    served: dict[str, dict[str, Any]]
    client_mb: list[float] = field(default_factory=list)

    @property
    def ok(self) -> list[RequestRecord]:
        return [record for record in self.records if record.outcome is RequestOutcome.OK]


class _Silent(PlainView):
    def say(self, text: str) -> None:
        return


def measure(
    script: str,
    load: LoadSpec,
    seconds: float,
    *,
    scheme: str = "http",
    processes: int = 1,
    max_tokens: int = 64,
    max_in_flight: int | None = None,
    prompts: int = 20_000,
) -> MeasuredShift:
    """Runs one shift with its own conductor, client processes and server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        books = folder / "books"
        command = (
            f"{shlex.quote(sys.executable)} {_FAKE} --{scheme} {{port}} --books {books} {script}"
        )
        server = ServerSpec("fake", f"{scheme}://127.0.0.1:{{port}}", command)
        pool = [Prompt(f"p{n}", "proof", turns=(f"say p{n}",)) for n in range(prompts)]
        plan = RunPlan(
            arms=(ArmSpec("fake", server, TargetSpec("")),),
            loads=(load,),
            pool=pool,
            prompts="numbered",
            is_natural=False,
            remarks=(),
            request_options=RequestOptions(max_tokens=max_tokens),
            timing=Timing(seconds, 0.0, 0.0, timeout_s=20.0, drain_s=20.0),
            client_processes=processes,
            max_in_flight=max_in_flight,
        )
        run = RunFolder(folder)
        asyncio.run(_conduct(plan, run))
        [shift] = run.shifts()
        rows = map(json.loads, books.with_suffix(f".{scheme}.jsonl").read_text().splitlines())
        samples = (sample for sample in run.samples() if sample.server == CLIENTS)
        return MeasuredShift(
            shift,
            list(run.requests()),
            {row["prompt"]: row for row in rows},
            [sample.memory_mb for sample in samples if sample.memory_mb is not None],
        )


async def _conduct(plan: RunPlan, run: RunFolder) -> None:
    async with Conductor(plan, run, _Silent(Console(stderr=True))).open() as conductor:
        await conductor.run_plan()


def open_load(rate: float, prompts: int = 20_000, *, is_even: bool = False) -> LoadSpec:
    arrivals = Constant(rate) if is_even else Poisson(rate)
    return LoadSpec(f"rate {rate:g}", "rate", rate, arrivals=arrivals, prompt_range=(0, prompts))


def closed_load(clients: int, prompts: int = 20_000) -> LoadSpec:
    return LoadSpec(
        f"clients {clients}", "clients", clients, clients=clients, prompt_range=(0, prompts)
    )


def agreement(lengths: StageDurations) -> Iterator[dict[str, Any]]:
    """Percentiles measured by the clients and by the server, over the same requests."""
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
                client_ms, server_ms = (
                    float(np.percentile(each, percent)) * 1e3 for each in (ours, theirs)
                )
                limit = max(AGREES_MS, AGREES_SHARE * server_ms)
                yield {
                    "delays": name,
                    "quantity": f"{quantity} p{percent}",
                    "requests": len(books),
                    "client_ms": round(client_ms, 3),
                    "server_ms": round(server_ms, 3),
                    "differs_ms": round(client_ms - server_ms, 3),
                    "agrees": abs(client_ms - server_ms) <= limit,
                }


def stall(lengths: StageDurations) -> dict[str, Any]:
    """A server that stalls for two seconds: latency from the intended and from the sent time."""
    script = f"--ttft 5ms --updates 1 --stall 500ms {STALL_S:g}s"
    seconds = max(lengths.rate_s, 4.0)
    measured = measure(script, open_load(50, is_even=True), seconds, max_in_flight=2)
    return {
        "stall_s": STALL_S,
        "requests": len(measured.ok),
        "p90_from_intended_ms": _p90_ms(measured, lambda r: r.end_s - r.intended_s),
        "p90_from_sent_ms": _p90_ms(measured, lambda r: r.end_s - r.sent_s),
    }


def _p90_ms(measured: MeasuredShift, seconds: Callable[[RequestRecord], float]) -> float:
    return round(float(np.percentile([seconds(r) for r in measured.ok], 90)) * 1e3, 1)


def on_time(lengths: StageDurations) -> Iterator[dict[str, Any]]:
    """The request rate that clients can send on time."""
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
                break  # higher rates cannot be on time and are slow to drain


def events(lengths: StageDurations) -> Iterator[dict[str, Any]]:
    """Updates a second that a client reads from one server process."""
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


def memory(lengths: StageDurations) -> dict[str, Any]:
    """The client's memory over a long shift."""
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
    parser = argparse.ArgumentParser(prog="python -m outrider.loadtest.proof")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    options = parser.parse_args()
    lengths = QUICK if options.quick else StageDurations()
    console = Console()
    parts: dict[str, tuple[str, Callable[[StageDurations], Any]]] = {
        "agreement": ("Latencies of client and server", agreement),
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
        figures = part(lengths)
        rows = [figures] if isinstance(figures, dict) else list(figures)
        result[name] = rows
        console.print(table(title, rows), "")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not all(row["agrees"] for row in result["agreement"]):
        sys.exit(f"error: latencies differ by more than {AGREES_MS:g} ms and {AGREES_SHARE:.0%}.")


if __name__ == "__main__":
    main()
