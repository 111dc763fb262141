"""`outrider status`: a server's model, processes, load and speculation."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.connecting import (
    ApiKeyOption,
    ClientCertOption,
    ServerOption,
    TlsCaOption,
    connect,
)
from outrider.cli.speculation_text import max_depth_of
from outrider.cli.status_tables import STATE_STYLES, processes_table, replicas_table
from outrider.client import DEFAULT_SERVER, Client, ServerStatus

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from outrider.links.gateway_messages import EngineStatus
    from outrider.links.speculation import SpeculationStatus

_WATCH_S = 1.0

app = typer.Typer(add_completion=False)


@app.command()
def status(
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON, one object a line.", show_default=False)
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Refresh until Ctrl-C.", show_default=False),
    ] = False,
    every_s: Annotated[
        float, typer.Argument(metavar="[SECONDS]", help="Refresh interval of --watch.", min=0.1)
    ] = _WATCH_S,
) -> None:
    """Show a server's model, replicas, processes, load, KV memory and acceptance."""
    with connect(server, api_key, tls_ca, client_cert) as client:
        if as_json:
            typer.echo(_as_json(client.status()))
            while watch:
                time.sleep(every_s)
                typer.echo(_as_json(client.status()))
        elif watch:
            _watch(client, every_s)
        else:
            from outrider.cli.visible import SafeConsole

            SafeConsole(highlight=False).print(_picture(client.status()))


def _as_json(found: ServerStatus) -> str:
    shown = dataclasses.asdict(found)
    for each in (shown, *shown["replicas"]):
        if each["engine"] is not None:
            del each["engine"]["query"]
    return json.dumps(shown)


def _watch(client: Client, every_s: float) -> None:
    from rich.live import Live

    from outrider.cli.visible import SafeConsole

    console = SafeConsole()
    with Live(_picture(client.status()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_picture(client.status()), refresh=True)


def _picture(found: ServerStatus) -> Group:
    from rich.console import Group

    parts = [_table(_server_rows(found))]
    if found.cluster is not None:
        parts.append(processes_table(found.cluster, found.replicas))
    if len(found.replicas) > 1:
        parts.append(replicas_table(found.replicas))
    elif found.engine is not None:
        holders = _own_models(found.engine) if found.engine.models else _ranks(found.engine)
        parts += [holders, _table(_load_rows(found.engine))]
        if found.engine.speculation is not None:
            parts.append(_table(_speculation_rows(found.engine.speculation)))
    return Group(*(part for each in parts for part in (each, "")))


def _table(rows: dict[str, str]) -> Table:
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(Column(), Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    for label, value in rows.items():
        table.add_row(label, Text(value, STATE_STYLES.get(value, "")))
    return table


def _ranks(engine: EngineStatus) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("role", "rank", "pid", "host", "device", "state"):
        table.add_column(name, justify="right" if name in ("rank", "pid") else "left")
    for rank in engine.ranks:
        cells = (rank.role, str(rank.rank), str(rank.pid), rank.host, rank.device)
        state = Text(rank.state, STATE_STYLES.get(rank.state, "yellow"))
        table.add_row(*map(Text, cells), state)
    return table


def _own_models(engine: EngineStatus) -> Table:
    """Models in the engine's own process, without ranks."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("role", "pid", "host", "device", "process"):
        table.add_column(name, justify="right" if name == "pid" else "left")
    for model in engine.models:
        table.add_row(model.role, str(model.pid), model.host, model.device, "the engine's")
    return table


def _server_rows(found: ServerStatus) -> dict[str, str]:
    rows = {
        "model": found.model or "-",
        "state": found.state,
        "version": found.version,
        "uptime": _duration(found.uptime_s),
        "active requests": str(found.active_requests),
    }
    operation = None if found.cluster is None else found.cluster.order
    if operation is not None:
        rows["last operation"] = f"{operation.what}: {operation.state}"
        if operation.detail:
            rows["last operation"] += f" ({operation.detail})"
    settings = found.settings
    if settings is not None:
        rows["target"] = f"{settings.target}, tensor parallel {settings.target_tensor_parallel}"
        if settings.draft_tensor_parallel:
            rows["draft"] = f"{settings.draft}, tensor parallel {settings.draft_tensor_parallel}"
        elif settings.draft:
            rows["head"] = f"{settings.draft}, with the target"
        rows["speculation"] = settings.method
        if settings.method != "off":
            rows["speculation"] += f", {settings.verification} verification"
        rows["longest text"] = f"{settings.max_model_len} tokens"
    return rows


def _load_rows(engine: EngineStatus) -> dict[str, str]:
    share = engine.kv_blocks_used / engine.kv_blocks if engine.kv_blocks else 0.0
    rows = {
        "running": str(engine.running),
        "waiting": str(engine.waiting),
        "KV blocks": f"{engine.kv_blocks_used} of {engine.kv_blocks} ({share:.0%})",
        "steps": str(engine.steps),
        "committed": f"{engine.committed_tokens} tokens",
        "acceptance": "-",
        "preemptions": str(engine.preemptions),
    }
    if not engine.models:
        rows["proposals over"] = engine.proposal_backend or "-"
        rows["draft lost"] = f"{engine.draft_losses} times"
    ahead = engine.counters.ahead
    if ahead.rounds:
        rate = ahead.hits / ahead.rounds
        rows["drafted ahead"] = f"{rate:.1%} hits ({ahead.hits} of {ahead.rounds} rounds)"
    if engine.drafted_tokens:
        rate = engine.accepted_tokens / engine.drafted_tokens
        rows["acceptance"] = f"{rate:.1%} ({engine.accepted_tokens} of {engine.drafted_tokens})"
    return rows


def _speculation_rows(found: SpeculationStatus) -> dict[str, str]:
    settings = found.settings
    policy = settings.policy
    if policy != settings.first_policy:
        policy += f" (initially {settings.first_policy})"
    depth = "no drafting"
    if found.mean_depth:
        depth = f"{found.mean_depth:.1f}, {found.drafting_share:.0%} of rows draft"
    elif found.steps_without:
        depth += f", for {found.steps_without} steps"
    off_by = found.calibration_error
    rows = {
        "policy": policy,
        "max depth": f"{max_depth_of(settings)} unless a request asks for less",
        "depth now": depth,
        "recent acceptance": _share(found.acceptance),
        "agreement while off": _share(found.agreement),
        "gain over plain": "-" if found.gain is None else f"{found.gain:.2f} times, estimated",
        "arrival rate": f"{found.arrivals_per_s:.2f} requests/s",
        "calibration error": _share(off_by),
    }
    if found.warning:
        rows["warning"] = found.warning
    return rows


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
