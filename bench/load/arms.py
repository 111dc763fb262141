"""Arms and servers as they are written: on the command line, or in a file.

    --arm off=localhost:50051?speculation=off          a server that runs already
    --server ours="outrider serve --no-ray --port 0 --grpc-port {port}"
    --arm deep=ours?num_speculative_tokens=4           a server to be started

    servers:
      ours:
        command: outrider serve --no-ray --port 0 --grpc-port {port}
      vllm:
        command: vllm serve ./model --port {port}
        env: {VLLM_CPU_KVCACHE_SPACE: "1"}
    arms:
      deep: {server: ours, extras: {num_speculative_tokens: 4}}
      vllm: {server: vllm, extras: {return_token_ids: true}}

What stands behind the question mark, or under `extras`, goes into every request of the arm.
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

from outrider.bench.load.files import settings_text
from outrider.bench.load.plan import Arm
from outrider.bench.load.servers.server import Idle, ServerSpec, idle_rule
from outrider.bench.load.targets.base import TargetSpec
from outrider.bench.load.targets.registry import is_inprocess
from outrider.errors import ConfigError

_MOST_VALUES = 10_000
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
) -> list[Arm]:
    """Those of the file, then those of the command line; `common` holds for every arm."""
    written = _read_file(file) if file is not None else {}
    specs: dict[str, dict[str, Any]] = dict(written.get("servers", {}))
    for text in servers:
        example = 'ours="outrider serve --port 0 --grpc-port {port}"'
        name, command = _split(text, "--server", example)
        specs[name] = {"command": command}
    given: dict[str, dict[str, Any]] = dict(written.get("arms", {}))
    named: set[str] = set()
    for text in arms:
        name, address = _split(text, "--arm", "ours=localhost:50051")
        if name in named:
            raise ConfigError(f"--arm {name!r} is given twice; give every arm its own name.")
        named.add(name)
        where, _, query = address.partition("?")
        if is_inprocess(address):
            where, query = address, ""  # there it configures the engine
        place = {"server": where} if where in specs else {"url": where}
        given[name] = {**place, "extras": _extras(query)}
    if not given:
        given = {name: {"server": name} for name in specs}
    return _build(given, specs, common, idle)


def _build(
    given: Mapping[str, Mapping[str, Any]],
    specs: Mapping[str, Mapping[str, Any]],
    common: TargetSpec,
    idle: Idle | None,
) -> list[Arm]:
    for what, entries in (("server", specs), ("arm", given)):
        for name, entry in entries.items():
            _check_kinds(f"{what} {name!r}", entry)
    used = {arm["server"] for arm in given.values() if "server" in arm}
    used |= {arm["url"] for arm in given.values() if "url" in arm}
    built = {
        name: _server(name, spec, idle, common, is_alone=len(used) == 1)
        for name, spec in specs.items()
    }
    result: list[Arm] = []
    for name, arm in given.items():
        _check_keys(f"arm {name!r}", arm, _ARM_KEYS)
        if "server" in arm:
            if arm["server"] not in built:
                raise ConfigError(
                    f"arm {name!r} is of server {arm['server']!r}, which is not among "
                    f"{', '.join(built) or 'any'}; name it with --server or in the file."
                )
            server = built[arm["server"]]
        elif "url" in arm:
            # Arms of one address are arms of one server.
            url = _address(name, arm["url"], specs)
            same = (arm.server for arm in result if arm.server.url == url)
            server = next(same, None) or _running(name, url, common)
        else:
            raise ConfigError(f"arm {name!r} has neither server nor url; give one.")
        result.append(Arm(name, server, _target(arm, server, common)))
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
    name: str, given: Mapping[str, Any], idle: Idle | None, common: TargetSpec, *, is_alone: bool
) -> ServerSpec:
    _check_keys(f"server {name!r}", given, _SERVER_KEYS)
    command = given.get("command")
    if command is not None:
        ServerSpec(
            name, "http://localhost:{port}", command
        )  # what is wrong with it is told before it is looked into
    url = given.get("url") or _url_of(name, command)
    if "idle" in given and given["idle"] not in list(Idle):
        raise ConfigError(
            f"server {name!r}: idle is {given['idle']!r}; choose from {', '.join(Idle)}."
        )
    rule = idle_rule(command, is_alone=is_alone)
    return ServerSpec(
        name=name,
        url=with_scheme(url),
        command=command,
        env={key: str(value) for key, value in (given.get("env") or {}).items()},
        cwd=Path(given["cwd"]) if given.get("cwd") else None,
        ready_timeout_s=float(given["ready_timeout_s"]) if "ready_timeout_s" in given else None,
        idle=Idle(given["idle"]) if "idle" in given else (idle if command and idle else rule.idle),
        headers=_headers(common),
        insecure=common.insecure,
    )


def _running(name: str, url: str, common: TargetSpec) -> ServerSpec:
    return ServerSpec(name=name, url=url, headers=_headers(common), insecure=common.insecure)


def _headers(common: TargetSpec) -> dict[str, str]:
    """What its health and its counters are asked with."""
    key = {"Authorization": f"Bearer {common.api_key}"} if common.api_key else {}
    return {**common.headers, **key}


def _address(arm: str, text: str, specs: Mapping[str, Any]) -> str:
    """Ours need a port; what is no address at all is most likely a server's name."""
    url = with_scheme(text)
    try:
        parts = urlsplit(url)
        is_right = url.startswith("inprocess:") or bool(parts.hostname)
        is_right = is_right and (parts.port is not None or not url.startswith("grpc"))
    except ValueError:
        is_right = False
    if not is_right:
        known = f" nor one of the servers {', '.join(specs)}" if specs else ""
        raise ConfigError(
            f"arm {arm!r} is at {text!r}, which is neither host:port, http(s)://host:port"
            f"{known}; correct it."
        )
    return url


def with_scheme(address: str) -> str:
    """A bare address is one of ours, which speaks gRPC."""
    return address if address.startswith(_SCHEMES) else f"grpc://{address}"


def _url_of(name: str, command: str | None) -> str:
    if command is None:
        raise ConfigError(f"server {name!r} has neither command nor url; give one.")
    if "{port}" not in command:
        raise ConfigError(
            f"server {name!r}: the command {command!r} has no {{port}}, so where it listens is "
            "not known; put {port} where its port belongs, or give url in a file."
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
    """A number, true, false, null or a JSON value; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _num_values(value: Any, most: int = _MOST_VALUES) -> int:
    """Those inside it too, each as often as it is meant; stops counting beyond `most`."""
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 1
    count = 1
    for each in inside:
        if count > most:
            break
        count += _num_values(each, most - count)
    return count


class _Loader(yaml.SafeLoader):
    """YAML in which only true and false are: `off` is a good name for an arm."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not tag.endswith(":bool")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        given = yaml.load(settings_text(path), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; write it flatter.") from None
    if _num_values(given) > _MOST_VALUES:  # a few aliases of aliases are billions
        raise ConfigError(f"{path} has more than {_MOST_VALUES} values; use fewer aliases.")
    if not isinstance(given, dict):
        raise ConfigError(f"{path} has neither servers nor arms; see the docs for an example.")
    parts = given
    _check_keys(str(path), parts, ("servers", "arms"))
    for part, entries in parts.items():
        is_right = isinstance(entries, dict) and all(
            isinstance(name, str) and isinstance(entry, dict) for name, entry in entries.items()
        )
        if not is_right:
            raise ConfigError(
                f"{path}: {part} must have a name that is text and settings for each entry."
            )
    return parts


def _check_kinds(what: str, given: Mapping[str, Any]) -> None:
    """Each setting of a file has the kind of value that is meant."""
    for key, value in given.items():
        kind, words = _KINDS.get(key, (str, "text"))
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"{what}: {key} is {value!r}; it must be {words}.")
        if kind is _NUMBER and not 0 < value < math.inf:
            raise ConfigError(f"{what}: {key} is {value!r}; it must be above 0.")


def _check_keys(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"{what} has {unknown[0]!r}; known are {', '.join(known)}.")
