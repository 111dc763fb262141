"""`outrider explain`: the candidates, choice and outcome of a server's recent steps."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.connecting import (
    ApiKeyOption,
    ClientCertOption,
    ServerOption,
    TlsCaOption,
    connect,
)
from outrider.client import DEFAULT_SERVER, SpeculationAccount
from outrider.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from outrider.links.speculation import CandidateAccount, StepAccount

app = typer.Typer(add_completion=False)


@app.command()
def explain(
    step: Annotated[
        int | None, typer.Option(help="This step; the last if not given.", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option(help="Number of recent steps, up to 256.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON, one object.", show_default=False)
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Explain recent steps of a server: candidates, predictions, the choice, the outcome."""
    if step is not None and last != 1:
        raise RequestError(f"--step is {step} and --last {last}; give one of the two.")
    with connect(server, api_key, tls_ca, client_cert) as client:
        account = client.explain_speculation(step, last)
    if as_json:
        typer.echo(json.dumps(_as_dict(account)))
        return
    from outrider.cli.visible import SafeConsole

    console = SafeConsole(highlight=False)
    for part in _picture(account):
        console.print(part)


def _as_dict(account: SpeculationAccount) -> dict[str, Any]:
    """With the derived rates."""
    shown = dataclasses.asdict(account) | {"calibration_error": account.calibration_error}
    for given, step in zip(account.steps, shown["steps"], strict=True):
        step["tokens_per_s"] = given.tokens_per_s
        for found, candidate in zip(given.candidates, step["candidates"], strict=True):
            candidate["tokens_per_s"] = found.tokens_per_s
        if given.chosen is not None:
            step["chosen"]["tokens_per_s"] = given.chosen.tokens_per_s
    return shown


def _picture(account: SpeculationAccount) -> list[RenderableType]:
    from rich.text import Text

    if not account.steps:
        return [Text("No step has been taken yet.")]
    parts: list[RenderableType] = []
    for step in account.steps:
        parts.append(Text(_heading(step), "bold"))
        if step.candidates:
            parts.append(_candidates(step))
        parts += [Text(f"Chosen: {step.reason}"), Text(_outcome(step)), Text()]
    return [*parts, Text(_calibration(account))]


def _heading(step: StepAccount) -> str:
    rows = "1 row decodes" if step.num_rows == 1 else f"{step.num_rows} rows decode"
    waiting = "1 request waits" if step.num_waiting == 1 else f"{step.num_waiting} requests wait"
    text = (
        f"step {step.step} ({step.policy}): {rows}, {waiting}, "
        f"{step.num_prompt_tokens} prompt tokens"
    )
    if step.num_caught_up:
        text += f", the draft catches up on {step.num_caught_up} tokens"
    return text


def _candidates(step: StepAccount) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column()
    for name in ("depth", "drafts", "verified", "tokens", "draft ms", "verify ms", "tokens/s"):
        table.add_column(name, justify="right")
    shown = list(step.candidates)
    if step.chosen is not None and step.chosen not in shown:
        shown.append(step.chosen)
    for each in shown:
        mark = "chosen" if each == step.chosen else "" if each.level else "plain"
        table.add_row(mark, *_cells(each), style="green" if mark == "chosen" else "")
    return table


def _cells(candidate: CandidateAccount) -> list[str]:
    return [
        str(candidate.level),
        str(candidate.num_drafts),
        str(candidate.num_verified),
        f"{candidate.tokens:.1f}",
        f"{candidate.draft_s * 1e3:.2f}",
        f"{candidate.verify_s * 1e3:.2f}",
        f"{candidate.tokens_per_s:,.0f}",
    ]


def _outcome(step: StepAccount) -> str:
    rate = step.tokens_per_s
    if step.committed is None:
        return "Then: the target has not answered yet."
    if not step.committed and not step.num_prompt_tokens:
        return "Then: nothing, as its requests had ended by then."
    drafts = "1 draft" if step.num_drafts == 1 else f"{step.num_drafts} drafts"
    tokens = "1 token" if step.committed == 1 else f"{step.committed} tokens"
    text = (
        f"Then: {tokens} with {drafts} in "
        f"{step.draft_s * 1e3:.2f} ms of drafting and {step.verify_s * 1e3:.2f} ms of verifying"
    )
    if rate is None:
        return f"{text}."
    text += f", {rate:,.0f} tokens/s"
    predicted = 0.0 if step.chosen is None else step.chosen.tokens_per_s
    if not predicted or step.chosen is None or step.chosen.num_drafts != step.num_drafts:
        return f"{text}."
    return f"{text}, {rate / predicted:.2f} times the prediction."


def _calibration(account: SpeculationAccount) -> str:
    error = account.calibration_error
    over = f"over the {account.num_remembered} steps remembered"
    if error is None:
        return f"Calibration error: nothing was predicted {over}."
    parts = ", ".join(f"{each:.0%}" for each in account.calibration)
    return f"Calibration error: {error:.0%} {over} (from the oldest on: {parts})."
