"""`outrider drain`: make a running server refuse new requests."""

from __future__ import annotations

import typer

from outrider.cli.connecting import (
    ApiKeyOption,
    ClientCertOption,
    ServerOption,
    TlsCaOption,
    connect,
)
from outrider.client import DEFAULT_SERVER

app = typer.Typer(add_completion=False)


@app.command()
def drain(
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Make every gateway refuse new requests from now on; running ones go on."""
    with connect(server, api_key, tls_ca, client_cert) as client:
        num_active = client.drain()
    typer.echo(f"draining; {num_active} running requests at the gateway that answered")
