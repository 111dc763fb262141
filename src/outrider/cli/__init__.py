"""The command `outrider`.

Subcommands are known here by name and summary only; the module behind one is imported when it is
called, so `outrider --help` is quick and needs no torch.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from outrider import __version__
from outrider.errors import ConfigError, OutriderError
from outrider.logs import setup_logging
from outrider.requirements import not_installed

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Lazy(NamedTuple):
    module: str  # holds a `typer.Typer` named `app`
    summary: str


COMMANDS = {
    "generate": _Lazy("outrider.cli.generate", "Generate text and show what speculation did."),
    "serve": _Lazy("outrider.cli.serve", "Serve a model over HTTP and gRPC."),
    "gateway": _Lazy("outrider.cli.gateway", "Serve HTTP and gRPC for servers on other hosts."),
    "controller": _Lazy("outrider.cli.controller", "Run replicas for gateways on other hosts."),
    "chat": _Lazy("outrider.cli.chat", "Talk to a running server."),
    "status": _Lazy("outrider.cli.status", "Show a server's model, processes and load."),
    "speculation": _Lazy(
        "outrider.cli.speculation", "Show and change a running server's speculation policy."
    ),
    "scale": _Lazy("outrider.cli.scale", "Change the number of replicas."),
    "rollout": _Lazy(
        "outrider.cli.rollout", "Replace replicas or drafts without losing a request."
    ),
    "drain": _Lazy("outrider.cli.drain", "Make a server refuse new requests."),
    "leave": _Lazy("outrider.cli.leave", "Move replicas off this host before it ends."),
    "abort": _Lazy("outrider.cli.abort", "End a running request."),
    "trace": _Lazy("outrider.cli.trace", "Trace rounds of draft and target as processes."),
    "explain": _Lazy("outrider.cli.explain", "Explain the drafting depth of recent steps."),
    "deploy": _Lazy("outrider.cli.deploy", "Bring a cluster up (`ray up`) with a server on it."),
    "bench": _Lazy("outrider.cli.bench", "Measure servers under load; compare runs."),
    "distill": _Lazy("outrider.cli.distill", "Train a draft or a head for a target."),
    "keys": _Lazy("outrider.cli.keys", "Make keys for a server's file of keys."),
    "config": _Lazy("outrider.cli.config", "Write, check and show the configuration."),
}

CLIENTS = ("chat", "status", "speculation", "scale", "rollout", "drain", "abort", "explain")
"""Commands that talk to a running server."""


@dataclass(slots=True)
class GlobalOptions:
    """Options before the subcommand, which gets them as `ctx.obj`."""

    debug: bool = False
    log_level: str | None = None
    log_json: bool = False
    server: str | None = None


class _LazyGroup(TyperGroup):
    """Lists commands by summary, and imports one only to run it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {n: TyperCommand(n, help=lazy.summary) for n, lazy in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = _without_boxes(
                typer.main.get_command(import_module(COMMANDS[name].module).app)
            )
        return name, command, rest


def _without_boxes(command: Any) -> Any:
    """Plain help: at 80 columns rich's boxes truncate option names."""
    command.rich_markup_mode = None
    for inner in getattr(command, "commands", {}).values():
        _without_boxes(inner)
    return command


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", show_default=False)
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(help="debug, info, warning or error; goes before log_level of the config."),
    ] = None,
    log_json: Annotated[
        bool,
        typer.Option("--log-json", help="Log JSON lines, as log_format: json.", show_default=False),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "-s",
            metavar="HOST:PORT",
            help="The server of client commands; may also follow the command.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version.",
            show_default=False,
        ),
    ] = False,
) -> None:
    """Speculative decoding that never changes the text."""
    options = ctx.ensure_object(GlobalOptions)
    options.debug, options.log_level, options.log_json = debug, log_level, log_json
    options.server = server
    command = ctx.invoked_subcommand
    if server is not None and command is not None and command not in CLIENTS:
        names = ", ".join(CLIENTS)
        raise ConfigError(f"--server does not apply to {command}, only to {names}; leave it out.")
    setup_logging(log_level or "info", role="cli", json_lines=log_json)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    options = GlobalOptions()
    try:
        code = app(args=args, prog_name="outrider", obj=options, standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        if options.debug:
            traceback.print_exception(error)
        sys.exit(_report(error))
    sys.exit(code if isinstance(code, int) else 0)


def _report_usage(error: Any) -> int:
    """The parser's message, with a lower-case "error:" as in ours."""
    written = io.StringIO()
    error.show(file=written)
    text = re.sub("^Error: ", "error: ", written.getvalue(), flags=re.MULTILINE)
    typer.echo(text, err=True, nl=False)
    return int(error.exit_code)


def _report(error: Exception) -> int:
    if isinstance(error, typer.Abort):  # EOF at a prompt
        typer.echo("error: aborted.", err=True)
        return 1
    if hasattr(error, "format_message"):  # the parser's own, with its usage
        return _report_usage(error)
    if isinstance(error, OutriderError):
        messages, exit_code = str(error).splitlines(), error.exit_code
    elif isinstance(error, ModuleNotFoundError) and (message := not_installed(error)) is not None:
        messages, exit_code = [message], 1
    else:
        hint = "run 'outrider --debug ...' to see where"
        messages, exit_code = [f"unexpected {type(error).__name__}: {error} ({hint})"], 1
    with contextlib.suppress(OSError):  # stderr is closed; the exit code remains
        from outrider.cli.visible import visible_on

        for message in messages:
            message = visible_on(sys.stderr, message)
            typer.echo(f"error: {message}", err=True)
    return exit_code
