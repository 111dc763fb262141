"""Reads and checks a cluster file of `ray up`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from outrider.config import EngineConfig
from outrider.config.sources import resolve
from outrider.errors import ConfigError
from outrider.gateway.exposure import check_exposure
from outrider.requirements import install_command, requirements

LOCAL = "local"  # Ray's provider type for existing hosts
CONF_MOUNT = "~/outrider/conf"
DIST_MOUNT = "~/outrider/dist"
SERVE_FILE = "serve.yaml"
# Placeholders that users must replace in the files of cluster/ray.
UNEDITED = "EDIT-"
# Supervisors of the server on the head: our keeper process, or the keeper under systemd.
KEEPER, SYSTEMD = "keeper", "systemd"


@dataclass(frozen=True)
class ClusterFile:
    """A file that has passed `read_cluster_file`."""

    path: Path
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.settings["cluster_name"])

    @property
    def is_local(self) -> bool:
        """Whether the hosts exist already, rather than being created by Ray."""
        return bool(self.settings["provider"]["type"] == LOCAL)

    @property
    def head_ip(self) -> str:
        """Of a local cluster: its address as seen from here."""
        provider = self.settings["provider"]
        return str(provider.get("external_head_ip") or provider["head_ip"])

    @property
    def worker_ips(self) -> tuple[str, ...]:
        """Of a local cluster."""
        return tuple(map(str, self.settings["provider"]["worker_ips"]))

    @property
    def auth(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.settings.get("auth") or {}
        return found

    @property
    def uses_systemd(self) -> bool:
        """Whether systemd on the head runs the server's keeper."""
        return bool(self._supervisor == SYSTEMD)

    @property
    def _supervisor(self) -> Any:
        return (self.settings.get("metadata") or {}).get("supervisor", KEEPER)

    @property
    def folder(self) -> Path:
        """Base of its relative paths."""
        return self.path.resolve().parent

    @cached_property
    def serving(self) -> EngineConfig:
        """The configuration of the server."""
        return resolve(self.source(CONF_MOUNT) / SERVE_FILE).config

    def source(self, mount: str) -> Path:
        """Local path of a file or folder that is copied to all hosts."""
        return self.folder / Path(self.settings["file_mounts"][mount]).expanduser()


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises `ConfigError` for the first mistake in the file."""
    file = ClusterFile(path, _read(path))
    _check_schema(file)
    for field, value in _strings(file.settings):
        if UNEDITED in value:
            raise ConfigError(f"{path}: {field} is {value!r}; put your own in its place.")
    _check_hosts(file)
    if file._supervisor not in (KEEPER, SYSTEMD):
        raise ConfigError(
            f"{path}: metadata.supervisor is {file._supervisor!r}; it must be {KEEPER} or "
            f"{SYSTEMD}."
        )
    _check_mounts(file)
    _check_serving(file)
    return file


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; 'outrider deploy init' writes one to edit."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f":{mark.line + 1}"
        reason = getattr(error, "problem", None) or "it is not text"
        raise ConfigError(f"{path}{where}: invalid YAML: {reason}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a mapping; 'outrider deploy init' writes one to edit.")
    return found


def ray_schema() -> Any:
    """The JSON schema of the installed Ray for cluster files."""
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:
        command = install_command(requirements("deploy"))
        raise ConfigError(f"Ray is not installed; install it with: {command}")
    return json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def _check_schema(file: ClusterFile) -> None:
    from jsonschema import Draft7Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft7Validator(ray_schema()).iter_errors(file.settings))
    if error is not None:
        field = ".".join(map(str, error.absolute_path)) or "the file"
        raise ConfigError(f"{file.path}: {field}: {error.message}; `ray up` would refuse it.")


def _strings(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, f"{field}.{name}".lstrip("."))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _strings(inner, f"{field}[{position}]")


def _check_hosts(file: ClusterFile) -> None:
    provider = file.settings["provider"]
    if (file.settings.get("docker") or {}).get("container_name"):
        raise ConfigError(
            f"{file.path}: docker.container_name is set, but the server is started on the hosts "
            "themselves; leave docker out."
        )
    if not file.is_local:
        return
    missing = [name for name in ("head_ip", "worker_ips") if not provider.get(name)]
    if missing:
        raise ConfigError(f"{file.path}: provider.{missing[0]} is missing; name the hosts to use.")
    if provider["head_ip"] in provider["worker_ips"]:
        raise ConfigError(
            f"{file.path}: provider.worker_ips names the head, {provider['head_ip']}; a host "
            "cannot be both."
        )
    if "ssh_user" not in file.auth:
        raise ConfigError(f"{file.path}: auth.ssh_user is missing; name the SSH user of the hosts.")


def _check_mounts(file: ClusterFile) -> None:
    mounts = file.settings.get("file_mounts") or {}
    if CONF_MOUNT not in mounts:
        raise ConfigError(
            f"{file.path}: file_mounts has no {CONF_MOUNT}; it carries the folder of {SERVE_FILE}, "
            "the server's configuration."
        )
    for mount in mounts:
        if not file.source(mount).exists():
            raise ConfigError(
                f"{file.path}: file_mounts: {mount} comes from {mounts[mount]}, which is not in "
                f"{file.folder}."
            )
    if DIST_MOUNT in mounts:
        wheels = sorted(each.name for each in file.source(DIST_MOUNT).glob("outrider-*.whl"))
        if len(wheels) != 1:
            found = ", ".join(wheels) or "none"
            raise ConfigError(
                f"{file.path}: file_mounts: {DIST_MOUNT} comes from {mounts[DIST_MOUNT]}, which "
                f"must hold one wheel of Outrider and holds {found}; `make wheel` builds it."
            )


def _check_serving(file: ClusterFile) -> None:
    serving = file.source(CONF_MOUNT) / SERVE_FILE
    if not serving.is_file():
        raise ConfigError(f"{serving} is missing; it configures the server.")
    if file.serving.server.admin_port in (None, 0):
        raise ConfigError(f"{serving}: server.admin_port must be set; its readiness probe is used.")
    if 0 in (file.serving.server.port, file.serving.server.grpc_port):
        raise ConfigError(
            f"{serving}: server.port and server.grpc_port must be set, so that clients know them."
        )
    check_exposure(file.serving.server)
