"""`outrider bench`: measures servers under load, and reports."""

from __future__ import annotations

import typer

from outrider.cli.bench.results import compare, report
from outrider.cli.bench.serve import serve

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure servers under load; compare runs."
)
app.command()(serve)
app.command()(compare)
app.command()(report)
