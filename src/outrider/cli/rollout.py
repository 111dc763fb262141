"""`outrider rollout`: replaces every replica of a running server, or only its draft."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.config import setting_help
from outrider.cli.connecting import (
    ApiKeyOption,
    ClientCertOption,
    ServerOption,
    TlsCaOption,
    connect,
)
from outrider.cli.operations import TIMEOUT_S, follow
from outrider.cli.scale import TimeoutOption, WaitOption
from outrider.client import DEFAULT_SERVER
from outrider.config.sources import SourcedValue, merge_given, read_assignments
from outrider.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def rollout(
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.FIELD=VALUE",
            help="A setting of target, draft, speculation, cache or scheduler to change. May be "
            "repeated; without any, replicas restart with the same settings.",
            show_default=False,
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", help=setting_help("draft_model"), show_default=False),
    ] = None,
    kube: Annotated[
        Path | None,
        typer.Option(
            "--kube",
            metavar="FILE",
            help="Replace RayClusters of a Helm release by those in FILE instead, through the "
            "Kubernetes API; what the chart's upgrade Job runs.",
            show_default=False,
        ),
    ] = None,
    wait: WaitOption = True,
    timeout_s: TimeoutOption = TIMEOUT_S,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Replace replicas one after the other, or only their drafts if nothing else changes. No
    request is lost: each successor must pass a probe; if one fails, all are rolled back."""
    if kube is not None:
        if assignments or draft_model is not None:
            raise ConfigError("--kube takes its settings from the file; leave out --set.")
        _roll_out_in_kubernetes(kube)
        return
    given = read_assignments(assignments or ())
    if draft_model is not None:
        own = {"draft.model": SourcedValue(draft_model, "--draft-model")}
        given = merge_given(own, given)
    settings = {path: each.value for path, each in given.items()}
    with connect(server, api_key, tls_ca, client_cert) as client:
        client.roll_out(settings)
        if wait:
            follow(client, timeout_s)


def _roll_out_in_kubernetes(path: Path) -> None:
    from outrider.cluster.deploy.kube import Kube
    from outrider.cluster.deploy.kube_rollout import read_plan, roll_out

    asyncio.run(roll_out(Kube.in_cluster(), read_plan(path), lambda event: typer.echo(event.text)))
