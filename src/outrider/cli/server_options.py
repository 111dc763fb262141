"""What `outrider serve` and `outrider controller` share: options, configuration, running."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.config import load_config, setting_help
from outrider.cli.terminal import Terminal
from outrider.config import EngineConfig
from outrider.config.kwargs import PATHS
from outrider.config.sources import DEFAULT_ORIGIN
from outrider.errors import ConfigError
from outrider.log_stream import guard_stderr
from outrider.logs import setup_logging


def option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=setting_help("model"), show_default=False)
]
ModelOption = Annotated[str | None, option("--model", "-m", help="The same as an option.")]
DraftModelOption = Annotated[str | None, option("--draft-model", help=setting_help("draft_model"))]
AdminPortOption = Annotated[int | None, option("--admin-port", help=setting_help("admin_port"))]
ReplicasOption = Annotated[int | None, option("--replicas", help=setting_help("replicas"))]
RayAddressOption = Annotated[
    str | None,
    option("--address", help=f"{setting_help('ray_address')} 'auto' is the one on this host."),
]
ListenOption = Annotated[str | None, option("--listen", help=setting_help("listen"))]
NoRayOption = Annotated[
    bool, option("--no-ray", help="Start the processes on this host, without Ray.")
]


def flags_of(ctx: typer.Context) -> dict[str, Any]:
    """The values of a command's parameters that have the name of a setting in `LLM(...)`, in the
    order of their declaration. The model may be given as an argument, too."""
    names = [param.name for param in ctx.command.params if param.name in PATHS]
    flags = {name: ctx.params[name] for name in names}
    return flags | {"model": _one_of(ctx.params["model_argument"], ctx.params["model"])}


def configure(
    ctx: typer.Context,
    file: Path | None,
    assignments: list[str] | None,
    flags: dict[str, Any],
    check: Callable[[EngineConfig], object] | None = None,
) -> tuple[EngineConfig, str]:
    """The configuration, and the log level: "warning" by default, as the terminal shows events."""
    resolved = load_config(ctx, file, assignments, flags, check=check)
    config = resolved.config
    if resolved.origins["log_level"] != DEFAULT_ORIGIN:
        return config, config.log_level
    setup_logging("warning", role="server")
    return config, "warning"


def run_server(config: EngineConfig, log_level: str, *, use_ray: bool) -> None:
    """Serve until stopped; gateways log at `log_level`."""
    guard_stderr()
    terminal = Terminal(config)
    terminal.greet()
    from outrider.cluster.serve import serve as run
    from outrider.cluster.serve_callbacks import ServeCallbacks

    callbacks = ServeCallbacks(terminal.say, terminal.show_ready)
    run(config, callbacks, use_ray=use_ray, gateway_log_level=log_level)


def _one_of(argument: str | None, model: str | None) -> str | None:
    if argument is not None and model is not None and argument != model:
        raise ConfigError(
            f"the model is {argument!r} as an argument and {model!r} as --model; give only one of "
            "them."
        )
    return argument or model
