"""Reads arms and servers from the command line or from a file.

    --arm off=localhost:50051?speculation=off          a running server
    --server ours="outrider serve --no-ray --port 0 --grpc-port {port}"
    --arm deep=ours?num_speculative_tokens=4           a server the harness starts

    servers:
      ours:
        command: outrider serve --no-ray --port 0 --grpc-port {port}
      vllm:
        command: vllm serve ./model --port {port}
        env: {VLLM_CPU_KVCACHE_SPACE: "1"}
    arms:
      deep: {server: ours, extras: {num_speculative_tokens: 4}}
      vllm: {server: vllm, extras: {return_token_ids: true}}

Parameters after the question mark, or under `extras`, go into every request of the arm.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from outrider.errors import ConfigError
from outrider.input_files import settings_text
from outrider.loadtest.plan import ArmSpec
from outrider.loadtest.servers.server import Idle, ServerSpec, idle_rule
from outrider.loadtest.targets.base import TargetSpec
from outrider.loadtest.targets.registry import is_inprocess

_MAX_VALUES = 10_000
_SERVER_KEYS = ("command", "url", "env", "cwd", "ready_timeout_s", "idle")
_ARM_KEYS = ("server", "url", "model", "extras", "headers", "tokenizer", "channels")
_NUMBER = (int, float)
_SETTINGS = (dict, "names with their values")
_KINDS: dict[str, tuple[Any, str]] = {  # all others are text
    "env": _SETTINGS,
    "extras": _SETTINGS,
    "headers": _SETTINGS,
    "ready_timeout_s": (_NUMBER, "a number of seconds"),
    "channels": (int, "a whole number"),
}
_SCHEMES = ("grpc://", "grpcs://", "http://", "https://", "inprocess:")


def read_arms(
    arms: Sequence[str],
    servers: Sequence[str],
    file: Path | None,
    common: TargetSpec,
    idle: Idle | None = None,
) -> list[ArmSpec]:
    """Arms of the file, then of the command line; `common` applies to every arm."""
    from_file = _read_file(file) if file is not None else {}
    specs: dict[str, dict[str, Any]] = dict(from_file.get("servers", {}))
    for text in servers:
        example = 'ours="outrider serve --port 0 --grpc-port {port}"'
        name, command = _split(text, "--server", example)
        specs[name] = {"command": command}
    entries: dict[str, dict[str, Any]] = dict(from_file.get("arms", {}))
    seen: set[str] = set()
    for text in arms:
        name, address = _split(text, "--arm", "ours=localhost:50051")
        if name in seen:
            raise ConfigError(f"--arm {name!r} is given twice; give every arm its own name.")
        seen.add(name)
        location, _, query = address.partition("?")
        if is_inprocess(address):
            location, query = address, ""  # the query configures the engine
        at = {"server": location} if location in specs else {"url": location}
        entries[name] = {**at, "extras": _extras(query)}
    if not entries:
        entries = {name: {"server": name} for name in specs}
    return _build(entries, specs, common, idle)


def _build(
    arms: Mapping[str, Mapping[str, Any]],
    specs: Mapping[str, Mapping[str, Any]],
    common: TargetSpec,
    idle: Idle | None,
) -> list[ArmSpec]:
    for what, entries in (("server", specs), ("arm", arms)):
        for name, entry in entries.items():
            _check_kinds(f"{what} {name!r}", entry)
    used = {arm["server"] for arm in arms.values() if "server" in arm}
    used |= {arm["url"] for arm in arms.values() if "url" in arm}
    built = {
        name: _server(name, spec, idle, common, is_alone=len(used) == 1)
        for name, spec in specs.items()
    }
    result: list[ArmSpec] = []
    for name, arm in arms.items():
        _check_keys(f"arm {name!r}", arm, _ARM_KEYS)
        if "server" in arm:
            if arm["server"] not in built:
                raise ConfigError(
                    f"arm {name!r} is of server {arm['server']!r}, which is not among "
                    f"{', '.join(built) or 'any'}; name it with --server or in the file."
                )
            server = built[arm["server"]]
        elif "url" in arm:
            # Arms with the same address share one server.
            url = _address(name, arm["url"], specs)
            same = (arm.server for arm in result if arm.server.url == url)
            server = next(same, None) or _running(name, url, common)
        else:
            raise ConfigError(f"arm {name!r} has neither server nor url; give one.")
        result.append(ArmSpec(name, server, _target(arm, server, common)))
    return result


def _target(arm: Mapping[str, Any], server: ServerSpec, common: TargetSpec) -> TargetSpec:
    return dataclasses.replace(
        common,
        url=server.url,
        model=arm.get("model", common.model),
        extras={**common.extras, **(arm.get("extras") or {})},
        headers={**common.headers, **(arm.get("headers") or {})},
        tokenizer=arm.get("tokenizer", common.tokenizer),
        channels=arm.get("channels", common.channels),
    )


def _server(
    name: str, entry: Mapping[str, Any], idle: Idle | None, common: TargetSpec, *, is_alone: bool
) -> ServerSpec:
    _check_keys(f"server {name!r}", entry, _SERVER_KEYS)
    command = entry.get("command")
    if command is not None:
        # Validate the command before it is parsed for a scheme.
        ServerSpec(name, "http://localhost:{port}", command)
    url = entry.get("url") or _url_of(name, command)
    if "idle" in entry and entry["idle"] not in list(Idle):
        raise ConfigError(
            f"server {name!r}: idle is {entry['idle']!r}; choose from {', '.join(Idle)}."
        )
    rule = idle_rule(command, is_alone=is_alone)
    return ServerSpec(
        name=name,
        url=with_scheme(url),
        command=command,
        env={key: str(value) for key, value in (entry.get("env") or {}).items()},
        cwd=Path(entry["cwd"]) if entry.get("cwd") else None,
        ready_timeout_s=float(entry["ready_timeout_s"]) if "ready_timeout_s" in entry else None,
        idle=Idle(entry["idle"]) if "idle" in entry else (idle if command and idle else rule.idle),
        headers=_headers(common),
        insecure=common.insecure,
    )


def _running(name: str, url: str, common: TargetSpec) -> ServerSpec:
    return ServerSpec(name=name, url=url, headers=_headers(common), insecure=common.insecure)


def _headers(common: TargetSpec) -> dict[str, str]:
    """Headers of health probes and metric queries."""
    key = {"Authorization": f"Bearer {common.api_key}"} if common.api_key else {}
    return {**common.headers, **key}


def _address(arm: str, text: str, specs: Mapping[str, Any]) -> str:
    """gRPC addresses need a port; anything that is not an address is probably a server's name."""
    url = with_scheme(text)
    try:
        parts = urlsplit(url)
        is_valid = url.startswith("inprocess:") or bool(parts.hostname)
        is_valid = is_valid and (parts.port is not None or not url.startswith("grpc"))
    except ValueError:
        is_valid = False
    if not is_valid:
        known = f" nor one of the servers {', '.join(specs)}" if specs else ""
        raise ConfigError(
            f"arm {arm!r} is at {text!r}, which is neither host:port, http(s)://host:port"
            f"{known}; correct it."
        )
    return url


def with_scheme(address: str) -> str:
    """A bare host:port is an Outrider server, which speaks gRPC."""
    return address if address.startswith(_SCHEMES) else f"grpc://{address}"


def _url_of(name: str, command: str | None) -> str:
    if command is None:
        raise ConfigError(f"server {name!r} has neither command nor url; give one.")
    if "{port}" not in command:
        raise ConfigError(
            f"server {name!r}: the command {command!r} has no {{port}}, so its address is "
            "unknown; put {port} where its port belongs, or give url in a file."
        )
    is_ours = "outrider" in command and "serve" in shlex.split(command)
    return f"{'grpc' if is_ours else 'http'}://127.0.0.1:{{port}}"


def _split(text: str, option: str, example: str) -> tuple[str, str]:
    name, separator, rest = text.partition("=")
    if not separator or not name.strip() or not rest.strip():
        raise ConfigError(f"{option} is {text!r}; write NAME=..., as in {option} {example}.")
    return name.strip(), rest.strip()


def _extras(query: str) -> dict[str, Any]:
    return {name: value_of(value) for name, value in parse_qsl(query, keep_blank_values=True)}


def value_of(text: str) -> Any:
    """A JSON value where the text is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _num_values(value: Any, limit: int = _MAX_VALUES) -> int:
    """Counts nested values, aliased ones each time they appear; stops counting beyond `limit`."""
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 1
    count = 1
    for each in inside:
        if count > limit:
            break
        count += _num_values(each, limit - count)
    return count


class _Loader(yaml.SafeLoader):
    """YAML whose only booleans are true and false: `off` is a common name of an arm."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not tag.endswith(":bool")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        parts = yaml.load(settings_text(path), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; write it flatter.") from None
    if _num_values(parts) > _MAX_VALUES:  # nested aliases can expand to billions of values
        raise ConfigError(f"{path} has more than {_MAX_VALUES} values; use fewer aliases.")
    if not isinstance(parts, dict):
        raise ConfigError(f"{path} has neither servers nor arms; see the docs for an example.")
    _check_keys(str(path), parts, ("servers", "arms"))
    for part, entries in parts.items():
        is_valid = isinstance(entries, dict) and all(
            isinstance(name, str) and isinstance(entry, dict) for name, entry in entries.items()
        )
        if not is_valid:
            raise ConfigError(
                f"{path}: each entry of {part} must have a text name and a mapping of settings."
            )
    return parts


def _check_kinds(what: str, entry: Mapping[str, Any]) -> None:
    """Checks the type of each setting of a file."""
    for key, value in entry.items():
        kind, words = _KINDS.get(key, (str, "text"))
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"{what}: {key} is {value!r}; it must be {words}.")
        if kind is _NUMBER and not 0 < value < math.inf:
            raise ConfigError(f"{what}: {key} is {value!r}; it must be above 0.")


def _check_keys(what: str, entry: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in entry if key not in known]:
        raise ConfigError(f"{what} has {unknown[0]!r}; known are {', '.join(known)}.")
