"""`outrider controller`: replicas for gateways on other hosts, without gateways of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.config import ConfigOption, SetOption
from outrider.cli.server_options import (
    AdminPortOption,
    DraftModelOption,
    ListenOption,
    ModelArgument,
    ModelOption,
    NoRayOption,
    RayAddressOption,
    ReplicasOption,
    configure,
    flags_of,
    option,
    run_server,
)
from outrider.cli.settings_command import SettingsCommand

app = typer.Typer(add_completion=False)


@app.command(cls=SettingsCommand)
def controller(
    ctx: typer.Context,
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    draft_model: DraftModelOption = None,
    host: Annotated[str | None, option("--host", help="Address of the admin port.")] = None,
    admin_port: AdminPortOption = None,
    replicas: ReplicasOption = None,
    ray_address: RayAddressOption = None,
    listen: ListenOption = None,
    no_ray: NoRayOption = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Start and supervise replicas, and publish them for gateways on other hosts."""
    flags = flags_of(ctx) | {"gateway_processes": 0}
    engine_config, log_level = configure(ctx, config, assignments, flags)
    run_server(engine_config, log_level, use_ray=not no_ray)
