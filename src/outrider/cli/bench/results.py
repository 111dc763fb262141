"""`outrider bench compare` and `report`: evaluates finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli.bench import flags

if TYPE_CHECKING:
    from outrider.loadtest.results.analysis import Analysis
    from outrider.loadtest.results.measures import Slo
    from outrider.loadtest.runs import RunFolder

_RunA = Annotated[Path, typer.Argument(help="A requests.jsonl, or the folder of a run.")]
_RunB = Annotated[Path, typer.Argument(help="The one to compare it with.")]


def compare(
    a: _RunA,
    b: _RunB,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object of JSON.", show_default=False)
    ] = False,
) -> None:
    """Show which differences between two runs are significant."""
    flags.need_extra()
    from outrider.loadtest.results.compare import compare as compare_runs
    from outrider.loadtest.results.compare import table

    comparison = compare_runs(a, b)
    if as_json:
        typer.echo(json.dumps(comparison.to_json()))
    else:
        console = Console(highlight=False)
        console.print(table(comparison))
        for sentence in (*comparison.finding(), *comparison.cautions):
            console.print(sentence, markup=False, soft_wrap=True)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    slo: flags.SloOption = None,
) -> None:
    """Write a run's report again, as after a change of --slo."""
    flags.need_extra()
    from outrider.loadtest.results.measures import Slo
    from outrider.loadtest.runs import RunFolder

    limits = Slo.parse(slo) if slo else None
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    show_result(RunFolder(folder), limits, console)


def show_result(run: RunFolder, slo: Slo | None, console: Console) -> Analysis:
    """Write the report's files; print the findings and a table."""
    from outrider.loadtest.report.write import write_report
    from outrider.loadtest.results.analysis import analyse
    from outrider.loadtest.results.cautions import cautions
    from outrider.loadtest.results.findings import findings_of
    from outrider.loadtest.results.terminal import summary

    analysis = analyse(run, slo)
    findings = findings_of(run, analysis)
    paths = write_report(run, analysis, findings=findings)
    console.print(summary(analysis, console.width))
    for sentence in findings.sentences:
        is_alarm = sentence in findings.alarms
        console.print(sentence, style="bold red" if is_alarm else "bold", markup=False)
    for note in run.facts.notes:
        if note not in findings.searched:
            console.print(note, markup=False)
    for sentence in cautions(analysis):
        console.print(f"Mind: {sentence}", style="yellow", markup=False)
    console.print(f"\n{run.requests_path}\n{paths[0]}", markup=False)
    return analysis
