"""`outrider rollout`: every replica of a running server replaced, or only its draft."""

from __future__ import annotations

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
from outrider.cli.orders import TIMEOUT_S, follow
from outrider.cli.scale import TimeoutOption, WaitOption
from outrider.client import DEFAULT_SERVER
from outrider.config.sources import Given, merge_given, read_assignments

app = typer.Typer(add_completion=False)


@app.command()
def rollout(
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.FIELD=VALUE",
            help="A setting of target, draft, speculation, cache or scheduler to change. May be "
            "repeated; without any, replicas are replaced by their like.",
            show_default=False,
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", help=setting_help("draft_model"), show_default=False),
    ] = None,
    wait: WaitOption = True,
    timeout_s: TimeoutOption = TIMEOUT_S,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Replace replicas one after the other, or only their drafts if nothing else changes. No
    request is lost."""
    given = read_assignments(assignments or ())
    if draft_model is not None:
        own = {"draft.model": Given(draft_model, "--draft-model")}
        given = merge_given(own, given)
    settings = {path: each.value for path, each in given.items()}
    with connect(server, api_key, tls_ca, client_cert) as client:
        client.roll_out(settings)
        if wait:
            follow(client, timeout_s)
