"""`outrider abort`: end a running request."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.connecting import (
    ApiKeyOption,
    ClientCertOption,
    ServerOption,
    TlsCaOption,
    connect,
)
from outrider.client import DEFAULT_SERVER
from outrider.errors import RequestError

app = typer.Typer(add_completion=False)


@app.command()
def abort(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """End a request of any client."""
    with connect(server, api_key, tls_ca, client_cert) as client:
        num_ended = client.abort(request_id)
    if not num_ended:
        raise RequestError(f"no running request has the id {request_id!r}.")
    others = f" ({num_ended} requests of that id)" if num_ended > 1 else ""
    typer.echo(f"ended {request_id}{others}")
