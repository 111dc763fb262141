"""`outrider deploy`: bring up and tear down a cluster with a server on it, from one file."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from outrider.cluster.deploy.deployment import Deployment

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Bring a cluster up with a server on it (`ray up`), inspect it, take it down.",
)
_on_head = typer.Typer(help="Commands that `outrider deploy` runs on the head.")
app.add_typer(_on_head, name="on-head", hidden=True)

_CLUSTER_FILE = "cluster.yaml"
_CONF, _DIST, _TOKEN = "conf", "dist", "ray-token"

FileOption = Annotated[
    Path, typer.Option("--file", "-f", help="The cluster's file, as `ray up` reads it.")
]
TimeoutOption = Annotated[float, typer.Option(help="Seconds until all must be ready.", min=1)]
_DEFAULT_FILE = Path(_CLUSTER_FILE)
_DEFAULT_S = 1800.0


class HostSource(StrEnum):
    """Provider of the hosts."""

    ON_PREMISE = "on-premise"
    AWS = "aws"
    GCP = "gcp"


@app.command()
def init(
    kind: Annotated[HostSource, typer.Argument(help="Where the hosts come from.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the files.")] = Path("."),
    wheel: Annotated[
        Path | None,
        typer.Option(help="The wheel that hosts install, as `make wheel` built it.", exists=True),
    ] = None,
) -> None:
    """Write the files of a cluster to edit: hosts, settings, an API key, a token for Ray."""
    from outrider.gateway.auth.keys_file import key_digest, new_key

    if (folder / _CLUSTER_FILE).exists():
        raise ConfigError(f"{folder / _CLUSTER_FILE} exists; choose another folder.")
    source = files("outrider.cluster") / "ray"
    for name in (_CONF, _DIST):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / _CLUSTER_FILE).write_text((source / f"{kind}.yaml").read_text())
    (folder / _CONF / "serve.yaml").write_text((source / "serve.yaml").read_text())
    key = new_key()
    entry = {"name": "operator", "sha256": key_digest(key).hex(), "scopes": ["infer", "admin"]}
    _write_secret(folder / _CONF / "keys.yaml", json.dumps({"keys": [entry]}, indent=2) + "\n")
    _write_secret(folder / _TOKEN, secrets.token_hex(32))
    if wheel is not None:
        shutil.copy(wheel, folder / _DIST)
    typer.echo(f"API key of operator, shown only now: {key}", err=True)
    path = folder / _CLUSTER_FILE
    typer.echo(f"Wrote {path} and the files it names. Edit the lines marked EDIT, then:")
    typer.echo(f"outrider deploy up -f {path}")


def _write_secret(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


@app.command()
def up(file: FileOption = _DEFAULT_FILE, timeout: TimeoutOption = _DEFAULT_S) -> None:
    """Bring the cluster and its server to the state in the file; wait until ready."""
    with _deployment(file) as deployment:
        endpoints = deployment.up(timeout)
    typer.echo(f"ready\nHTTP  {endpoints.http}\ngRPC  {endpoints.grpc}")


@app.command()
def status(
    file: FileOption = _DEFAULT_FILE,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON instead of a table.", show_default=False)
    ] = False,
) -> None:
    """Show the cluster's hosts, its processes, and whether the server is ready."""
    with _deployment(file) as deployment:
        found = deployment.status()
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_status_lines(found)))


@app.command()
def down(file: FileOption = _DEFAULT_FILE) -> None:
    """Drain requests, then end server and cluster on every host."""
    with _deployment(file) as deployment:
        deployment.down()
    deployment.log.unlink(missing_ok=True)
    typer.echo("down: all processes have ended")


@_on_head.command("start")
def _start(
    timeout: TimeoutOption = _DEFAULT_S,
    systemd: Annotated[bool, typer.Option("--systemd", show_default=False)] = False,
) -> None:
    from outrider.cluster.deploy.head_service import HeadService

    _answer(lambda: HeadService().start(_print_progress, timeout, use_systemd=systemd))


@_on_head.command("status")
def _status() -> None:
    from outrider.cluster.deploy.head_service import HeadService

    _answer(HeadService().status)


@_on_head.command("renew-hosts")
def _renew_hosts() -> None:
    from outrider.cluster.deploy.head_monitor import renew_monitor

    _answer(lambda: {"was_running": renew_monitor()})


@_on_head.command("stop")
def _stop() -> None:
    from outrider.cluster.deploy.head_service import HeadService

    _answer(lambda: HeadService().stop(_print_progress))


def _deployment(file: Path) -> Deployment:
    from outrider.cluster.deploy.cluster_file import read_cluster_file
    from outrider.cluster.deploy.deployment import Deployment

    return Deployment(read_cluster_file(file), lambda text: typer.echo(f"  {text}", err=True))


def _print_progress(text: str) -> None:
    from outrider.cluster.deploy.remote import SAID

    print(f"{SAID}{text}", flush=True)


def _answer(work: Any) -> None:
    from outrider.cluster.deploy.remote import FAILED, RESULT

    try:
        print(f"{RESULT}{json.dumps(work() or {})}", flush=True)
    except OutriderError as error:
        print(f"{FAILED}{' '.join(str(error).splitlines())}", flush=True)
        raise typer.Exit(error.exit_code) from None


def _server_state(found: dict[str, Any]) -> str:
    server, is_kept = found["server"], found.get("keeper") is not None
    if server is None:
        return "not running, restarting" if is_kept else "not running"
    restarts = server.get("restarts", 0)
    known = [f"pid {server['pid']}", f"{restarts} restarts" if restarts else ""]
    kept = "" if is_kept else ", no keeper"
    return f"{server['state']} ({', '.join(filter(None, known))}{kept})"


def _status_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"server  {_server_state(found)}, outrider {found['version']}"]
    for node in found["nodes"]:
        alive = "" if node["is_alive"] else ", lost"
        amounts = f"{node['cpus']:g} CPUs, {node['gpus']:g} GPUs"
        lines.append(f"host    {node['ip']:15} {node['role'] or '-':8} {amounts}{alive}")
    for each in found["processes"]:
        lines.append(
            f"process {each['ip']:15} {each['kind']:12} pid {each['pid']}, {each['state']}"
        )
    if "trouble" in found:
        lines.append(f"Ray     {found['trouble']}")
    return lines
