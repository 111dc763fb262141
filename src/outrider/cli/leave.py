"""`outrider leave`: the preStop hook of a worker pod."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated

import typer

from outrider.errors import ConfigError

app = typer.Typer(add_completion=False)

PORT = 50060


@app.command()
def leave(
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Its `cluster.listen`. Default: the host in FQ_RAY_IP, set by KubeRay.",
            show_default=False,
        ),
    ] = None,
    limit_s: Annotated[
        float, typer.Option("--limit", help="Seconds until this host ends, after --after.")
    ] = 60.0,
    unreached_s: Annotated[
        float, typer.Option("--unreached", help="Seconds to retry an unreachable controller.")
    ] = 60.0,
    after_s: Annotated[
        float, typer.Option("--after", help="Seconds to go on serving first.")
    ] = 0.0,
) -> None:
    """Move replicas off this host, or drain them where no resources are free elsewhere. Returns
    when done. Authenticates with OUTRIDER_SECRET."""
    host = os.environ.get("FQ_RAY_IP")
    secret = os.environ.get("OUTRIDER_SECRET")
    if controller is None and not host:
        raise ConfigError("no controller is named; give --controller or set FQ_RAY_IP.")
    if not secret:
        raise ConfigError("OUTRIDER_SECRET is not set; it must be that of the controller.")
    from outrider.cluster.deploy.leaving import leave as take_leave

    time.sleep(after_s)
    place = controller or f"{host}:{PORT}"
    typer.echo(asyncio.run(take_leave(f"tcp:{place}", secret, limit_s, unreached_s)))
