"""python -m outrider.benchmarks.control <command>"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.benchmarks.checkout import commit
from outrider.benchmarks.control.engine import TEXTS, Blocks, LiveCell, line
from outrider.benchmarks.control.matrix import Cell, measure_matrix
from outrider.benchmarks.control.proofs import all_proofs
from outrider.benchmarks.control.scenarios import scenarios

_CPU_LOADS, _GPU_LOADS = [1, 4, 16], [1, 2, 4, 8, 16, 32, 64, 128, 256]
_LEAST_HOLDING = 0.95  # of all cells
_TEXTS, _GPU_PARTS = list(TEXTS), ["steady", "bursts", "matrix", "neighbours", "users"]
app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def control() -> None:
    """Proofs that speculation under control never loses."""


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(help="Repetitions of each scenario.")] = 4,
    processes: Annotated[int, typer.Option(help="At once.")] = 2,
    only: Annotated[str, typer.Option(help="Scenarios whose name has this in it.")] = "",
    every: Annotated[int, typer.Option(help="Only every n-th of these.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """The matrix on a virtual clock: the real scheduler and policies, simulated workers. Ends with
    1 if more than one cell of twenty fails."""
    chosen = [i for i, each in enumerate(scenarios()) if only in each.name][::every]
    console, done = Console(), list[Cell]()

    def on_cell(cell: Cell) -> None:
        done.append(cell)
        if out is not None:  # the results so far
            out.write_text(json.dumps(summary(done), indent=1) + "\n")
        if not cell.holds:
            console.print(
                f"{cell.name} (costs {cell.telling}, lag {cell.lag}): "
                f"{cell.of_best_fixed.value:.3f} [{cell.of_best_fixed.low:.3f}] of "
                f"{cell.best_fixed}, {cell.of_plain.value:.3f} [{cell.of_plain.low:.3f}] of off",
                highlight=False,
                soft_wrap=True,
            )

    cells = measure_matrix(chosen, seeds, processes, on_cell)
    show(cells, console)
    if sum(each.holds for each in cells) < _LEAST_HOLDING * len(cells):
        raise typer.Exit(1)


@app.command()
def proofs(
    seeds: Annotated[int, typer.Option(help="Repetitions of each.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Mixed batches, drift, crossing and full memory on a virtual clock. Ends with 1 if one
    fails."""
    found = all_proofs(seeds)
    for proof in found:
        word = "holds" if proof.holds else "FAILS"
        sign = "at most" if proof.is_most else "at least"
        typer.echo(f"{word}  {proof.name}: {proof.value:.3f} ({sign} {proof.goal:g})")
    if out is not None:
        out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    if not all(proof.holds for proof in found):
        raise typer.Exit(1)


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="JSON lines to write.")],
    per_group: Annotated[int, typer.Option(help="Prompts of each of the six groups.")] = 24,
    tokens: Annotated[int, typer.Option(help="Of each text.")] = 192,
) -> None:
    """Record which tokens the bundled draft predicts, for `simulate`."""
    from outrider.benchmarks.control.record import record_texts

    typer.echo(f"{record_texts(per_group, tokens, out)} texts")


@app.command()
def cpu(
    load: Annotated[list[int], typer.Option(help="Clients at once.")] = _CPU_LOADS,
    text: Annotated[list[str], typer.Option(help="Kinds of text.")] = _TEXTS,
    rounds: Annotated[int, typer.Option(help="Blocks of each arm.")] = 6,
    block_s: Annotated[float, typer.Option(help="Seconds of a block.")] = 2.0,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 48,
    bursts: Annotated[bool, typer.Option(help="All at once to their ends, instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """The matrix with the bundled pair in this process, arms switched live."""
    from outrider.benchmarks.control.cpu import measure_cpu

    blocks = Blocks(rounds, block_s, block_s / 4)
    _show_live(measure_cpu(load, text, blocks, tokens, bursts=bursts), out)


@app.command()
def gpu(
    part: Annotated[
        list[str], typer.Option(help="steady, bursts, matrix, neighbours, users.")
    ] = _GPU_PARTS,
    load: Annotated[list[int], typer.Option(help="Clients at once.")] = _GPU_LOADS,
    text: Annotated[list[str], typer.Option(help="Kinds of text.")] = _TEXTS[:1],
    rounds: Annotated[int, typer.Option(help="Blocks of each arm.")] = 4,
    block_s: Annotated[float, typer.Option(help="Seconds of a block.")] = 1.0,
    deterministic: Annotated[
        bool, typer.Option(help="Every batch computes the same: all arms write the same texts.")
    ] = False,
    limit_s: Annotated[float, typer.Option(help="No cell begins later than this.")] = 300.0,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """The matrix on one GPU with an 8B target and a 110M draft, arms switched live."""
    from outrider.benchmarks.control.gpu import measure_gpu

    found: dict[str, object] = {}
    try:
        blocks = Blocks(rounds, block_s, block_s / 4)
        measure_gpu(part, load, text, blocks, limit_s, found, deterministic=deterministic)
    finally:
        written = json.dumps(found, indent=1)
        typer.echo(written)
        if out is not None:
            out.write_text(written + "\n")


def _show_live(cells: list[LiveCell], out: Path | None) -> None:
    for cell in cells:
        typer.echo(line(cell))
    if out is not None:
        out.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


def summary(cells: list[Cell]) -> dict[str, object]:
    return {
        "commit": commit(),
        "scenarios": len(cells),
        "failing": sum(not cell.holds for cell in cells),
        "least_of_best_fixed": min(cell.of_best_fixed.low for cell in cells),
        "least_of_plain": min(cell.of_plain.low for cell in cells),
        "cells": [{**asdict(cell), "holds": cell.holds} for cell in cells],
    }


def show(cells: list[Cell], console: Console) -> None:
    table = Table(title=f"{sum(not cell.holds for cell in cells)} of {len(cells)} cells fail")
    for heading in ("", "value", "lower bound"):
        table.add_column(heading, justify="right")
    for name, shares in (
        ("least of best fixed", [cell.of_best_fixed for cell in cells]),
        ("least of off", [cell.of_plain for cell in cells]),
    ):
        least = min(shares, key=lambda each: each.low)
        table.add_row(name, f"{least.value:.3f}", f"{least.low:.3f}")
    console.print(table)


if __name__ == "__main__":
    app()
