"""Runs a plan and evaluates it: files, a table, a report, an exit code."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider import __version__
from outrider.cli.bench.planning import ResultOptions
from outrider.cli.bench.results import show_result
from outrider.errors import OutriderError
from outrider.loadtest.clients.shifts import LoadSpec
from outrider.loadtest.conductor import Conductor
from outrider.loadtest.dashboard import View, make_view
from outrider.loadtest.plain import without_key
from outrider.loadtest.plan import ArmSpec, RunPlan
from outrider.loadtest.results.analysis import analyse
from outrider.loadtest.results.chaos_verdict import DISTURBED, UNDISTURBED
from outrider.loadtest.results.thresholds import evaluate
from outrider.loadtest.runs import ArmFacts, CellFacts, RunFacts, RunFolder
from outrider.loadtest.search import Search, SearchResult, knee, largest_good
from outrider.loadtest.servers.chaos import Chaos
from outrider.loadtest.servers.chaos_file import PlannedEvent

DONE, THRESHOLD_MISSED, INTERRUPTED = 0, 3, 130
"""Exit codes."""
_SECRET = ("--api-key", "--header")


def carry_out(plan: RunPlan, folder: Path, wishes: ResultOptions, started: datetime) -> int:
    """The exit code: done, a threshold missed, or interrupted.

    A run that ends early, by Ctrl-C or because a server failed to restart, gets a partial report.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    run = RunFolder(folder)
    facts = _facts(plan, wishes, started)
    run.write_facts(facts)
    total = None if wishes.search else _num_shifts(plan, wishes)
    is_interrupted = False
    try:
        with make_view(total, console) as view:
            is_interrupted = not asyncio.run(_conduct(plan, run, view, wishes, facts))
    except OutriderError as error:
        if _has_measured(run):
            facts.notes.append(f"The run ended early: {str(error).splitlines()[0]}")
            run.write_facts(facts)
            show_result(run, wishes.slo, console)
        raise
    run.write_facts(facts)
    if is_interrupted and not _has_measured(run):
        console.print(
            f"Interrupted before anything was measured; requests sent are in {folder}.",
            markup=False,
        )
        return INTERRUPTED
    analysis = show_result(run, wishes.slo, console)
    checked = evaluate(wishes.thresholds, analysis)
    for each in checked:
        console.print(str(each), style="green" if each.met else "red", markup=False)
    if is_interrupted:
        return INTERRUPTED
    return DONE if all(each.met for each in checked) else THRESHOLD_MISSED


def _has_measured(run: RunFolder) -> bool:
    return any(not shift.is_discarded for shift in run.shifts())


async def _conduct(
    plan: RunPlan, run: RunFolder, view: View, wishes: ResultOptions, facts: RunFacts
) -> bool:
    """Whether it completed; everything it started has ended either way."""
    # SIGTERM cancels this task, as Ctrl-C does.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    conductor = Conductor(plan, run, view)
    try:
        async with conductor.open():
            if wishes.search is not None:
                for arm in plan.arms:
                    finding = await _search(conductor, run, facts, arm, wishes.search)
                    facts.notes.append(finding.sentence)
            elif wishes.chaos is not None:
                await _with_chaos(conductor, run, wishes.chaos)
            else:
                await conductor.run_plan()
    except asyncio.CancelledError:
        seconds = conductor.now_s()
        facts.notes.append(f"Interrupted after {seconds:,.0f} s: what was measured until then.")
        return False
    finally:
        facts.notes += conductor.remarks
    return True


async def _with_chaos(conductor: Conductor, run: RunFolder, planned: list[PlannedEvent]) -> None:
    """Run each shift twice: undisturbed, as reference for the answers, then disturbed."""
    for load in conductor.plan.loads:
        for arm in conductor.plan.arms:
            await conductor.shift(arm, load, UNDISTURBED)
            server = conductor.server_of(arm)
            chaos = Chaos(planned, server, run.chaos_path, conductor.now_s)
            disturbing = asyncio.create_task(chaos.run())
            try:
                await conductor.shift(arm, load, DISTURBED)
                await disturbing  # bounded: gives up on a part that does not return
            finally:
                disturbing.cancel()


def _num_shifts(plan: RunPlan, wishes: ResultOptions) -> int:
    return 2 * len(plan.loads) * len(plan.arms) if wishes.chaos else len(plan.order())


async def _search(
    conductor: Conductor, run: RunFolder, facts: RunFacts, arm: ArmSpec, search: Search
) -> SearchResult:
    loads = conductor.plan.loads
    values = [load.value for load in loads]

    async def measure(value: float) -> float:
        load = _like(loads[0], value)
        facts.cells = [cell for cell in facts.cells if cell.name != load.name]
        facts.cells.append(_cell(load))
        run.write_facts(facts)
        await conductor.shift(arm, load, block=0)
        figures = analyse(run, search.slo).of(arm.name, load.name)
        if search.kind == "knee":
            return figures.output_tokens_s or 0.0
        return (figures.goodput.share or 0.0) if figures.goodput else 0.0

    if search.kind == "knee":
        return await knee(arm.name, int(values[0]), measure)
    return await largest_good(arm.name, min(values), max(values), measure)


def _like(load: LoadSpec, value: float) -> LoadSpec:
    """The same load at another rate or number of clients."""
    if load.kind == "clients":
        return replace(load, name=f"clients {value:g}", value=value, clients=int(value))
    rate = float(f"{value:.3g}")
    arrivals: Any = load.arrivals  # a shape with one rate
    return replace(load, name=f"rate {rate:g}", value=rate, arrivals=replace(arrivals, rate=rate))


def _facts(plan: RunPlan, wishes: ResultOptions, started: datetime) -> RunFacts:
    return RunFacts(
        command=shlex.join(["outrider", *_without_secrets(sys.argv[1:])]),
        started=started.isoformat(timespec="seconds"),
        seed=plan.request_options.seed,
        arms=[
            ArmFacts(
                name=arm.name,
                server=arm.server.name,
                url=arm.server.url,
                extras=dict(arm.target.extras),
                command=arm.server.command and without_key(arm.server.command),
            )
            for arm in plan.arms
        ],
        cells=[] if wishes.search else [_cell(load) for load in plan.loads],
        options={
            "blocks": plan.blocks,
            "measured_s": plan.timing.measured_s,
            "warm_up_s": plan.timing.warm_up_s,
            "cool_down_s": plan.timing.cool_down_s,
            "timeout_s": plan.timing.timeout_s,
            "requests": plan.timing.max_requests,
            "max_tokens": plan.request_options.max_tokens,
            "output": plan.request_options.length,
            "turns": plan.request_options.max_turns,
            "disjoint_prompts": plan.is_disjoint,
            "baseline": wishes.baseline,
        },
        machine=_machine(),
        prompts=plan.prompts,
        is_natural=plan.is_natural,
        notes=list(plan.remarks),
    )


def _cell(load: LoadSpec) -> CellFacts:
    return CellFacts(load.name, load.kind, load.value, load.text, load.temperature)


def _machine() -> dict[str, object]:
    return {
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "outrider": __version__,
    }


def _processor() -> str:
    """The name in /proc/cpuinfo; platform may know only the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _without_secrets(arguments: list[str]) -> list[str]:
    """The command line without the values of --api-key and --header."""
    shown: list[str] = []
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        if shown and shown[-1] in _SECRET:
            argument = "***"
        elif name in _SECRET and has_value:
            argument = f"{name}=***"
        shown.append(without_key(argument))
    return shown
