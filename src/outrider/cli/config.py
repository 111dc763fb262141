"""`outrider config`, and the options shared by commands with a configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import GlobalOptions
from outrider.cli.vllm_options import translation_of
from outrider.config import EngineConfig, find_setting
from outrider.config.kwargs import PATHS
from outrider.config.sources import (
    DEFAULT_ORIGIN,
    Resolved,
    SourcedValue,
    example_text,
    merge_given,
    read_assignments,
    read_kwargs,
    resolve,
)
from outrider.errors import ConfigError
from outrider.logs import setup_logging

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Configuration file (YAML); OUTRIDER_CONFIG if not given.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        help="Any setting, as 'outrider config show' lists them; may be repeated.",
        show_default=False,
    ),
]

_HIDDEN = "(set, not shown)"

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Write, check and show the configuration."
)


def setting_help(kwarg: str) -> str:
    """Help of a command's own flag, from the setting that its `LLM(...)` name stands for."""
    setting = find_setting(PATHS[kwarg])
    default = "" if setting.default in (None, ()) else f" Default: {setting.default}."
    return setting.doc + default


def load_config(
    ctx: typer.Context,
    file: Path | None,
    assignments: list[str] | None,
    flags: Mapping[str, Any] | None = None,
    implied: Mapping[str, SourcedValue] | None = None,
    check: Callable[[EngineConfig], object] | None = None,
) -> Resolved:
    """Load a command's configuration, and set up logging from it.

    `flags` are the command's own, by the names of `LLM(...)`, None if not given; `implied` are
    settings that follow from a flag, by path. Values given twice must be equal. `check` may raise
    further `ConfigError`s. All problems are raised together.
    """
    options = ctx.ensure_object(GlobalOptions)
    foreign = translation_of(ctx)
    problems = list(foreign.problems)
    try:
        own = read_kwargs(flags or {}, as_flags=True)
        if options.log_level is not None:
            own["log_level"] = SourcedValue(options.log_level, "--log-level")
        if options.log_json:
            own["log_format"] = SourcedValue("json", "--log-json")
        translated = {} if problems else foreign.values
        assigned = read_assignments(assignments or ())
        given = merge_given(own, implied or {}, assigned, translated)
        resolved = resolve(file, os.environ, given)
        if check is not None:
            check(resolved.config)
    except ConfigError as error:
        raise ConfigError("\n".join([*problems, str(error)])) from None
    if problems:
        raise ConfigError("\n".join(problems))
    config = resolved.config
    setup_logging(config.log_level, role="cli", json_lines=config.log_format == "json")
    foreign.log()
    return resolved


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("outrider.yaml"),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing file.", show_default=False)
    ] = False,
) -> None:
    """Write an example file: every setting explained, at its default."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(example_text())
    except FileExistsError:
        raise ConfigError(f"{path} exists; choose another name or add --force.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
    typer.echo(f"Wrote {path}. Check it after editing with: outrider config check {path}")


@app.command()
def check(path: Annotated[Path, typer.Argument(help="The file to check.")]) -> None:
    """Check a file by itself; every mistake is shown with its line."""
    resolved = resolve(path)
    num_set = sum(origin != DEFAULT_ORIGIN for origin in resolved.origins.values())
    typer.echo(f"{path} is valid; it sets {num_set} of {len(resolved.origins)} settings.")


@app.command()
def show(
    ctx: typer.Context,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON instead of a table.", show_default=False)
    ] = False,
) -> None:
    """Show every setting in force and where its value came from."""
    resolved = load_config(ctx, config, assignments)
    values = resolved.config.without_secrets().to_settings()
    values |= {p: _HIDDEN for p in values if _is_hidden(resolved, p)}
    if as_json:
        rows = {p: {"value": v, "origin": resolved.origins[p]} for p, v in values.items()}
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(values, resolved.origins)


@app.command()
def tokenizer(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help=setting_help("model"), show_default=False)
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Print the folder of the target's tokenizer, for load tools that count tokens."""
    from outrider.text.tokenizer import tokenizer_folder

    target = load_config(ctx, config, assignments, {"model": model}).config.target
    typer.echo(tokenizer_folder(*target.tokenizer_source))


def _is_hidden(resolved: Resolved, path: str) -> bool:
    is_secret = find_setting(path).rule.is_secret
    return is_secret and resolved.config.to_settings()[path] is not None


def _words(path: str, value: Any, origin: str) -> str:
    """A value for people: "unset" is decided at start, "none" is a choice."""
    if value is None:
        is_left_open = origin == DEFAULT_ORIGIN and find_setting(path).default is None
        return "unset" if is_left_open else "none"
    return value if isinstance(value, str) else json.dumps(value)


def _print_table(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(name, overflow="fold") for name in ("setting", "value", "from"))
    table = Table(*columns, box=None, pad_edge=False)
    for path, value in values.items():
        style = "dim" if origins[path] == DEFAULT_ORIGIN else "bold"
        cells = (path, _words(path, value, origins[path]), origins[path])
        table.add_row(*(Text(cell, style) for cell in cells))
    Console().print(table)
