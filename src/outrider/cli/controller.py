"""`outrider controller`: replicas for gateways on other hosts, and no gateways of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.config import ConfigOption, SetOption, setting_help
from outrider.cli.other_options import SettingsCommand
from outrider.cli.serve import (
    AddressOption,
    AdminPortOption,
    ListenOption,
    NoRayOption,
    ReplicasOption,
    configure,
    one_of,
    run_server,
)

app = typer.Typer(add_completion=False)


@app.command(cls=SettingsCommand)
def controller(
    ctx: typer.Context,
    named: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=setting_help("model"), show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The same as an option.", show_default=False),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", help=setting_help("draft_model"), show_default=False),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address of the admin port.", show_default=False),
    ] = None,
    admin_port: AdminPortOption = None,
    replicas: ReplicasOption = None,
    address: AddressOption = None,
    listen: ListenOption = None,
    no_ray: NoRayOption = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Start and keep replicas, and publish them for gateways on other hosts."""
    flags = {
        "model": one_of(named, model),
        "draft_model": draft_model,
        "host": host,
        "admin_port": admin_port,
        "replicas": replicas,
        "ray_address": address,
        "listen": listen,
        "gateway_processes": 0,
    }
    engine_config, log_level = configure(ctx, config, assignments, flags)
    run_server(engine_config, log_level, use_ray=not no_ray)
