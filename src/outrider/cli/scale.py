"""`outrider scale`: changes the number of replicas of a running server."""

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
from outrider.cli.operations import TIMEOUT_S, follow
from outrider.client import DEFAULT_SERVER

WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until it is done, and show progress.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Maximum seconds to wait.")]

app = typer.Typer(add_completion=False)


@app.command()
def scale(
    num_replicas: Annotated[int, typer.Argument(metavar="N", help="How many, 1 to 256.", min=0)],
    wait: WaitOption = True,
    timeout_s: TimeoutOption = TIMEOUT_S,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Set the number of replicas. Surplus replicas drain; no request is lost."""
    with connect(server, api_key, tls_ca, client_cert) as client:
        client.scale(num_replicas)
        if wait:
            follow(client, timeout_s)
