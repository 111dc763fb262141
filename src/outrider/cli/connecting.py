"""The options of every command that talks to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.client import Client

ServerOption = Annotated[
    str, typer.Option("--server", "-s", metavar="HOST:PORT", help="The server's gRPC address.")
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="The key to show; OUTRIDER_API_KEY if not given.",
        show_default=False,
    ),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="Use TLS, and trust these authorities (PEM); https://HOST trusts everybody's.",
        show_default=False,
    ),
]
ClientCertOption = Annotated[
    Path | None,
    typer.Option(
        "--client-cert",
        metavar="FILE",
        help="Certificate and key (PEM) to show to a server that asks for them.",
        show_default=False,
    ),
]


# Somebody sits there: longer than a gateway takes to be started anew, and not much longer.
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
