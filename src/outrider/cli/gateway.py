"""`outrider gateway`: HTTP and gRPC for the replicas of controllers, or for one engine."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.config import ConfigOption, SetOption, load_config, setting_help
from outrider.cli.server_options import option
from outrider.cli.settings_command import SettingsCommand
from outrider.log_stream import guard_stderr
from outrider.logs import setup_logging

app = typer.Typer(add_completion=False)


@app.command(cls=SettingsCommand)
def gateway(
    ctx: typer.Context,
    controllers: Annotated[
        list[str] | None,
        option("--controllers", help=f"{setting_help('controllers')} May be repeated."),
    ] = None,
    engine: Annotated[
        str | None,
        option("--engine", help="Serve only this engine, unix:/path or tcp:host:port."),
    ] = None,
    host: Annotated[str | None, option("--host", help=setting_help("host"))] = None,
    port: Annotated[int | None, option("--port", help=setting_help("port"))] = None,
    grpc_port: Annotated[int | None, option("--grpc-port", help=setting_help("grpc_port"))] = None,
    admin_port: Annotated[
        int | None, option("--admin-port", help=setting_help("admin_port"))
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve the replicas of other hosts (cluster.listen); OUTRIDER_SECRET must be theirs."""
    named = [name.strip() for each in controllers or () for name in each.split(",")]
    flags = {
        "controllers": named or None,
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "admin_port": admin_port,
    }
    guard_stderr()
    found = load_config(ctx, config, assignments, flags).config
    setup_logging(found.log_level, role="gateway", json_lines=found.log_format == "json")
    from outrider.gateway.entrypoints import run, serve

    run(serve(found.server, engine))
