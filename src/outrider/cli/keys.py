"""`outrider keys`: keys for the file that `server.api_keys_file` names."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml

from outrider.gateway.auth.caller import Scope
from outrider.gateway.auth.keys_file import entry_of, key_digest, new_key

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make keys for a server's file of keys."
)


@app.callback()
def _group() -> None:
    """Make keys for a server's file of keys."""


def _limit(help: str) -> Any:
    return typer.Option(help=help, show_default=False)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Its owner; shown in logs.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it allows; may be repeated.", show_default=True)
    ] = None,
    requests_per_minute: Annotated[int | None, _limit("Maximum requests per minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, _limit("Maximum prompt and output tokens per minute.")
    ] = (None),
    max_concurrent: Annotated[int | None, _limit("Maximum concurrent requests.")] = None,
    expires: Annotated[
        str | None, _limit("Last day (2030-01-31), or when it ends (2030-01-31T12:00:00Z).")
    ] = None,
    group: Annotated[str | None, _limit("Keys of a group share cached prompts.")] = None,
    min_priority: Annotated[int | None, _limit("Most urgent priority of its requests.")] = None,
    max_priority: Annotated[int | None, _limit("Least urgent priority of its requests.")] = None,
) -> None:
    """Make a key. Prints it once, on stderr; the entry for the file goes to stdout."""
    key = new_key()
    scopes = scope or [Scope.INFER]
    entry: dict[str, Any] = {
        "name": name,
        "sha256": key_digest(key).hex(),
        "scopes": sorted({each.value for each in scopes}),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "expires": expires,
        "group": group,
        "min_priority": min_priority,
        "max_priority": max_priority,
    }
    given = {field: value for field, value in entry.items() if value is not None}
    entry_of(given)
    typer.echo(f"API key of {name}, shown only now: {key}", err=True)
    typer.echo("Its entry for 'keys:' in the file of server.api_keys_file:", err=True)
    typer.echo(yaml.safe_dump([given], sort_keys=False, default_flow_style=None).rstrip())
