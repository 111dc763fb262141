"""`outrider speculation`: shows and changes the speculation policy of a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.connecting import (
    ApiKeyOption,
    ClientCertOption,
    GroupServerOption,
    ServerOption,
    TlsCaOption,
    connect,
    keep_server,
)
from outrider.cli.speculation_text import MEANINGS, NONE, settings_lines
from outrider.client import DEFAULT_SERVER, UnavailableError
from outrider.errors import RequestError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Show and change a running server's speculation policy.",
)


@app.callback()
def _group(ctx: typer.Context, server: GroupServerOption = None) -> None:
    keep_server(ctx, server)


@app.command("set")
def set_speculation(
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"Policy that chooses depths: {', '.join(MEANINGS)}.", show_default=False
        ),
    ] = None,
    max_depth: Annotated[
        str | None,
        typer.Option(
            metavar="N|none",
            help="Maximum depth of any request, 0 to 32; 'none' leaves each its own limit.",
            show_default=False,
        ),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Change the policy from the next step on. No restart; running requests keep their text."""
    if policy is None and max_depth is None:
        raise RequestError("there is nothing to set; give --policy, --max-depth or both.")
    bound = _bound(max_depth)
    with connect(server, api_key, tls_ca, client_cert) as client:
        settings = client.set_speculation(policy, bound, lift_max_depth=max_depth == NONE)
    for line in settings_lines(settings):
        typer.echo(line)


@app.command()
def show(
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Show the current policy."""
    with connect(server, api_key, tls_ca, client_cert) as client:
        engine = client.status().engine
    if engine is None or engine.speculation is None:
        raise UnavailableError("the server has no engine at the moment; try again soon.")
    for line in settings_lines(engine.speculation.settings):
        typer.echo(line)


def _bound(max_depth: str | None) -> int | None:
    if max_depth is None or max_depth == NONE:
        return None
    try:
        return int(max_depth)
    except ValueError:
        raise RequestError(
            f"--max-depth is {max_depth!r}; it must be a whole number from 0 to 32, or none."
        ) from None
