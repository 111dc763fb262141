"""`outrider serve`: target and draft in processes of the server, answering over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.config import ConfigOption, SetOption, load_config, setting_help
from outrider.cli.other_options import SettingsCommand
from outrider.cli.terminal import Terminal
from outrider.config import EngineConfig
from outrider.config.sources import DEFAULT_ORIGIN
from outrider.errors import ConfigError
from outrider.log_stream import guard_stderr
from outrider.logs import setup_logging

app = typer.Typer(add_completion=False)


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


# What `outrider controller` has as well.
AdminPortOption = Annotated[int | None, _option("--admin-port", help=setting_help("admin_port"))]
ReplicasOption = Annotated[int | None, _option("--replicas", help=setting_help("replicas"))]
AddressOption = Annotated[
    str | None,
    _option("--address", help=f"{setting_help('ray_address')} 'auto' is the one on this host."),
]
ListenOption = Annotated[str | None, _option("--listen", help=setting_help("listen"))]
NoRayOption = Annotated[
    bool, _option("--no-ray", help="Start the processes on this host, without Ray.")
]


@app.command(cls=SettingsCommand)
def serve(
    ctx: typer.Context,
    named: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=setting_help("model"), show_default=False)
    ] = None,
    model: Annotated[str | None, _option("--model", "-m", help="The same as an option.")] = None,
    draft_model: Annotated[
        str | None,
        _option(
            "--draft-model",
            help=setting_help("draft_model"),
        ),
    ] = None,
    method: Annotated[str | None, _option("--method", help=setting_help("method"))] = None,
    policy: Annotated[
        str | None,
        _option("--policy", "--speculation-policy", help=setting_help("speculation_policy")),
    ] = None,
    depth: Annotated[
        int | None,
        _option("--num-speculative-tokens", "-k", help=setting_help("num_speculative_tokens")),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        _option("--tensor-parallel-size", "--tp", help=setting_help("tensor_parallel_size")),
    ] = None,
    draft_tensor_parallel_size: Annotated[
        int | None,
        _option("--draft-tensor-parallel-size", help=setting_help("draft_tensor_parallel_size")),
    ] = None,
    host: Annotated[str | None, _option("--host", help=setting_help("host"))] = None,
    port: Annotated[int | None, _option("--port", help=setting_help("port"))] = None,
    grpc_port: Annotated[int | None, _option("--grpc-port", help=setting_help("grpc_port"))] = None,
    admin_port: AdminPortOption = None,
    processes: Annotated[
        int | None,
        _option("--processes", "--gateway-processes", help=setting_help("gateway_processes")),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _option(
            "--served-model-name",
            help=f"{setting_help('served_model_name')} May be repeated, or have commas.",
        ),
    ] = None,
    api_key: Annotated[str | None, _option("--api-key", help=setting_help("api_key"))] = None,
    allow_anonymous: Annotated[
        bool, _option("--allow-anonymous", help=setting_help("allow_anonymous"))
    ] = False,
    chat_template: Annotated[
        str | None, _option("--chat-template", help=setting_help("chat_template"))
    ] = None,
    generation_config: Annotated[
        str | None, _option("--generation-config", help=setting_help("generation_config"))
    ] = None,
    replicas: ReplicasOption = None,
    address: AddressOption = None,
    listen: ListenOption = None,
    no_ray: NoRayOption = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve a model over HTTP and gRPC; the bundled pair if none is named.

    Options of `vllm serve` are taken too, as docs/from-vllm.md says.
    """
    flags = {
        "model": one_of(named, model),
        "draft_model": draft_model,
        "method": method,
        "speculation_policy": policy,
        "num_speculative_tokens": depth,
        "tensor_parallel_size": tensor_parallel_size,
        "draft_tensor_parallel_size": draft_tensor_parallel_size,
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "admin_port": admin_port,
        "gateway_processes": processes,
        "served_model_name": _names(served_model_name),
        "api_key": api_key,
        "allow_anonymous": allow_anonymous or None,
        "chat_template": chat_template,
        "generation_config": generation_config,
        "replicas": replicas,
        "ray_address": address,
        "listen": listen,
    }
    engine_config, log_level = configure(ctx, config, assignments, flags, check=_check_exposure)
    run_server(engine_config, log_level, use_ray=not no_ray)


def _check_exposure(config: EngineConfig) -> None:
    from outrider.gateway.exposure import check_exposure

    check_exposure(config.server)


def run_server(config: EngineConfig, log_level: str, *, use_ray: bool) -> None:
    """Until it is stopped; gateways log at `log_level`."""
    guard_stderr()
    terminal = Terminal(config)
    terminal.greet()
    from outrider.cluster.serve import serve as run
    from outrider.cluster.watching import Watchers

    watchers = Watchers(terminal.say, terminal.show_ready)
    run(config, watchers, use_ray=use_ray, gateway_log_level=log_level)


def one_of(named: str | None, model: str | None) -> str | None:
    if named is not None and model is not None and named != model:
        raise ConfigError(
            f"the model is {named!r} as an argument and {model!r} as --model; give only one of "
            "them."
        )
    return named or model


def _names(given: list[str] | None) -> list[str] | None:
    """Each may be several with commas between them."""
    return [name.strip() for each in given for name in each.split(",")] if given else None


def configure(
    ctx: typer.Context,
    file: Path | None,
    assignments: list[str] | None,
    flags: dict[str, Any],
    check: Callable[[EngineConfig], object] | None = None,
) -> tuple[EngineConfig, str]:
    """The configuration, and the level of logs on the terminal, which tells most of it itself."""
    resolved = load_config(ctx, file, assignments, flags, check=check)
    config = resolved.config
    if resolved.origins["log_level"] != DEFAULT_ORIGIN:
        return config, config.log_level
    setup_logging("warning", role="server")
    return config, "warning"
