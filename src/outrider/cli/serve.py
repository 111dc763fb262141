"""`outrider serve`: serves target and draft over HTTP and gRPC."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.config import ConfigOption, SetOption, setting_help
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
from outrider.config import EngineConfig

app = typer.Typer(add_completion=False)


@app.command(cls=SettingsCommand)
def serve(
    ctx: typer.Context,
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    draft_model: DraftModelOption = None,
    method: Annotated[str | None, option("--method", help=setting_help("method"))] = None,
    speculation_policy: Annotated[
        str | None,
        option("--policy", "--speculation-policy", help=setting_help("speculation_policy")),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        option("--num-speculative-tokens", "-k", help=setting_help("num_speculative_tokens")),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        option("--tensor-parallel-size", "--tp", help=setting_help("tensor_parallel_size")),
    ] = None,
    draft_tensor_parallel_size: Annotated[
        int | None,
        option("--draft-tensor-parallel-size", help=setting_help("draft_tensor_parallel_size")),
    ] = None,
    host: Annotated[str | None, option("--host", help=setting_help("host"))] = None,
    port: Annotated[int | None, option("--port", help=setting_help("port"))] = None,
    grpc_port: Annotated[int | None, option("--grpc-port", help=setting_help("grpc_port"))] = None,
    admin_port: AdminPortOption = None,
    gateway_processes: Annotated[
        int | None,
        option("--processes", "--gateway-processes", help=setting_help("gateway_processes")),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            help=f"{setting_help('served_model_name')} May be repeated, or have commas.",
        ),
    ] = None,
    api_key: Annotated[str | None, option("--api-key", help=setting_help("api_key"))] = None,
    allow_anonymous: Annotated[
        bool, option("--allow-anonymous", help=setting_help("allow_anonymous"))
    ] = False,
    chat_template: Annotated[
        str | None, option("--chat-template", help=setting_help("chat_template"))
    ] = None,
    generation_config: Annotated[
        str | None, option("--generation-config", help=setting_help("generation_config"))
    ] = None,
    replicas: ReplicasOption = None,
    ray_address: RayAddressOption = None,
    listen: ListenOption = None,
    no_ray: NoRayOption = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve a model over HTTP and gRPC; the bundled pair if none is named.

    Options of `vllm serve` are taken too, as docs/from-vllm.md says.
    """
    flags = flags_of(ctx) | {
        "served_model_name": _names(served_model_name),
        "allow_anonymous": allow_anonymous or None,
    }
    engine_config, log_level = configure(ctx, config, assignments, flags, check=_check_exposure)
    run_server(engine_config, log_level, use_ray=not no_ray)


def _check_exposure(config: EngineConfig) -> None:
    from outrider.gateway.exposure import check_exposure

    check_exposure(config.server)


def _names(given: list[str] | None) -> list[str] | None:
    """Split comma-separated names."""
    return [name.strip() for each in given for name in each.split(",")] if given else None
