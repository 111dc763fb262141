"""The connection options of client commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import GlobalOptions
from outrider.client import Client
from outrider.errors import ConfigError

SERVER_VARIABLE = "OUTRIDER_SERVER"


def _chosen(ctx: typer.Context, server: str) -> str:
    """The address given at the command, else before it, else in the environment."""
    before = ctx.ensure_object(GlobalOptions).server
    source = ctx.get_parameter_source("server")
    if before is None or (source is not None and source.name == "COMMANDLINE"):
        if before not in (None, server):
            raise ConfigError(
                f"--server is {before!r} before the command and {server!r} after it; give one."
            )
        return server
    return before


ServerOption = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        metavar="HOST:PORT",
        envvar=SERVER_VARIABLE,
        callback=_chosen,
        help="The server's gRPC address; may follow any word of the command.",
    ),
]


def keep_server(ctx: typer.Context, server: str | None) -> None:
    """Handle a --server between a command and its subcommand."""
    if server is not None:
        options = ctx.ensure_object(GlobalOptions)
        options.server = server if options.server is None else options.server
        if options.server != server:
            raise ConfigError(
                f"--server is {options.server!r} and {server!r}; give only one of them."
            )


GroupServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", "-s", metavar="HOST:PORT", help="See the subcommands.", show_default=False
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="API key; OUTRIDER_API_KEY if not given.",
        show_default=False,
    ),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="Use TLS, and trust these authorities (PEM); https://HOST trusts the system's.",
        show_default=False,
    ),
]
ClientCertOption = Annotated[
    Path | None,
    typer.Option(
        "--client-cert",
        metavar="FILE",
        help="Client certificate and key (PEM), for mutual TLS.",
        show_default=False,
    ),
]


# Interactive use: a bit longer than the restart of a gateway.
RESUME_WINDOW_S = 20.0


def connect(
    server: str, api_key: str | None, tls_ca: Path | None, client_cert: Path | None
) -> Client:
    return Client(
        server,
        api_key=api_key,
        tls=tls_ca,
        client_cert=client_cert,
        resume_window_s=RESUME_WINDOW_S,
    )
