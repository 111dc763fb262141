"""Sources of the configuration: flags over `OUTRIDER_*` over a YAML file over defaults.

Every value keeps its origin, and all errors are reported at once with the place to change:
`outrider.yaml:12: target.dtype is 'int8'; it must be ...`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from outrider.config import SECTIONS, EngineConfig, find_setting, settings
from outrider.config.kwargs import settings_from_kwargs
from outrider.config.rules import FieldError, did_you_mean
from outrider.errors import ConfigError

DEFAULT_ORIGIN = "default"
FILE_VARIABLE = "OUTRIDER_CONFIG"
# Our variables that are not settings: the configuration file, the folder of converted weights, the
# links' secret, and the clients' server.
RESERVED_VARIABLES = frozenset(
    {FILE_VARIABLE, "OUTRIDER_CACHE", "OUTRIDER_SECRET", "OUTRIDER_SERVER"}
)

# Variables that Kubernetes sets in containers for a Service whose name begins with "outrider".
_SERVICE_URL = r"(tcp|udp|sctp)://\S+:\d+"
_SERVICE_VARIABLES = tuple(
    (re.compile(r"OUTRIDER(_[A-Z0-9_]+)?" + name), re.compile(value))
    for name, value in (
        (r"_SERVICE_HOST", r"[0-9.]+|[0-9a-fA-F:]+"),
        (r"_SERVICE_PORT(_[A-Z0-9_]+)?", r"\d+"),
        (r"_PORT(_\d+_(TCP|UDP|SCTP))?", _SERVICE_URL),
        (r"_PORT_\d+_(TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
        (r"_PORT_\d+_(TCP|UDP|SCTP)_PORT", r"\d+"),
        (r"_PORT_\d+_(TCP|UDP|SCTP)_ADDR", r"[0-9.]+|[0-9a-fA-F:]+"),
    )
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and its origin: a flag, a variable, or a file and line."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The resolved configuration, and the origin of each setting by path."""

    config: EngineConfig
    origins: Mapping[str, str]


def resolve(
    file: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, SourcedValue] | None = None,
) -> Resolved:
    """Merge the sources. Without `file`, the variable OUTRIDER_CONFIG of `env` may name one."""
    env = env or {}
    collected = _Collector()
    file = file or env.get(FILE_VARIABLE)
    if file:
        _read_file(Path(file), collected)
    _read_env(env, collected)
    for path, given in (flags or {}).items():
        collected.put(path, given.value, given.origin)
    collected.raise_problems()
    try:
        config = EngineConfig.from_settings({p: g.value for p, g in collected.given.items()})
    except FieldError as error:
        origin = next(collected.given[p].origin for p in error.paths if p in collected.given)
        raise ConfigError(f"{origin}: {error}") from None
    origins = {p: collected.origin_of(p) for p in settings()}
    return Resolved(config, origins)


def read_assignments(texts: Iterable[str], origin: str = "--set") -> dict[str, SourcedValue]:
    """Values by path from texts such as "cache.block_size=32"."""
    given: dict[str, SourcedValue] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{origin} got {text!r}; write it as section.field=value.")
        try:
            rule = find_setting(path.strip()).rule
        except FieldError as error:
            raise ConfigError(f"{origin}: {error}") from None
        given[path.strip()] = SourcedValue(rule.parse(value), origin)
    return given


def read_kwargs(kwargs: Mapping[str, Any], *, as_flags: bool = False) -> dict[str, SourcedValue]:
    """Values by path from the flat names of `LLM(...)`; as flags, their origin is "--name"."""
    values, names = settings_from_kwargs(kwargs, _flag_of if as_flags else str)
    return {path: SourcedValue(value, names[path]) for path, value in values.items()}


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def merge_given(*sources: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Merge one command's values from several sources. Raises if two of them differ."""
    merged: dict[str, SourcedValue] = {}
    for source in sources:
        for path, given in source.items():
            other = merged.setdefault(path, given)
            if other.value != given.value:
                raise ConfigError(
                    f"{other.origin} sets {path} to {_shown(path, other.value)} and {given.origin} "
                    f"to {_shown(path, given.value)}; give only one of them."
                )
    return merged


def _shown(path: str, value: Any) -> str:
    if value is not None and find_setting(path).rule.is_secret:
        return "one value"
    return "none" if value is None else repr(value)


def example_text() -> str:
    """A file that changes nothing: every setting at its default, explained and commented out."""
    lines = [
        "# Outrider's configuration. Each line shows a default; remove its # to change it.",
        "# Flags come before OUTRIDER_* variables, those before this file.",
    ]
    section = ""
    for path, setting in settings().items():
        head, _, name = path.rpartition(".")
        indent = "  " if head else ""
        if head != section:
            lines.append("")
            lines += [f"# {SECTIONS[head].__doc__}", f"{head}:"] if head else []
            section = head
        value = yaml.safe_dump(setting.default, default_flow_style=True).splitlines()[0]
        lines += [f"{indent}# {setting.doc}", f"{indent}#{name}: {value}"]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Collector:
    """Collects values, and all problems instead of the first one."""

    given: dict[str, SourcedValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, origin: str) -> None:
        try:
            rule = find_setting(path).rule
            value = rule.settled(value)
            problem = rule.breach(value)
        except FieldError as error:
            self.problems.append(f"{origin}: {error}")
            return
        if problem is not None:
            self.problems.append(f"{origin}: {path} {problem}")
        self.given[path] = SourcedValue(value, origin)

    def origin_of(self, path: str) -> str:
        return self.given[path].origin if path in self.given else DEFAULT_ORIGIN

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def _read_env(env: Mapping[str, str], collected: _Collector) -> None:
    by_name = {name: setting for setting in settings().values() for name in setting.env_names}
    for name in sorted(env):
        if not name.startswith("OUTRIDER_") or name in RESERVED_VARIABLES:
            continue
        if _is_of_service(name, env[name]):
            logger.debug("%s=%s describes a Kubernetes Service, ignored", name, env[name])
        elif name in by_name:
            setting = by_name[name]
            value = setting.rule.parse(env[name])
            for other in set(setting.env_names) & set(env) - {name}:
                if setting.rule.parse(env[other]) != value:
                    problem = f"{name} and {other} both set {setting.path}; unset one of them."
                    raise ConfigError(problem)
            collected.put(setting.path, value, name)
        else:
            hint = did_you_mean(name, [*by_name, *RESERVED_VARIABLES])
            collected.problems.append(f"{name} is no setting; unset or rename it.{hint}")


def _is_of_service(name: str, value: str) -> bool:
    return any(n.fullmatch(name) and v.fullmatch(value) for n, v in _SERVICE_VARIABLES)


def _read_file(file: Path, collected: _Collector) -> None:
    text = _read_text(file)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            _read_mapping(file, loader, root, "", collected)
        elif root is not None and _value_of(loader, root) is not None:
            line = root.start_mark.line + 1
            raise ConfigError(f"{file}:{line}: the file must hold sections such as 'target:'.")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        reason = getattr(error, "problem", None) or "it holds characters YAML does not allow"
        raise ConfigError(f"{place}: this is not valid YAML: {reason}.") from None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        remedy = f"write one with 'outrider config init {file}'"
        raise ConfigError(f"{file}: there is no such file; {remedy}.") from None
    except OSError as error:
        raise ConfigError(f"{file}: it cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: it is not text; a configuration is YAML in UTF-8.") from None


def _read_mapping(
    file: Path, loader: yaml.SafeLoader, node: yaml.MappingNode, prefix: str, collected: _Collector
) -> None:
    lines: dict[str, int] = {}
    for key, child in node.value:
        line = key.start_mark.line + 1
        origin = f"{file}:{line}"
        if not isinstance(key, yaml.ScalarNode):
            collected.problems.append(f"{origin}: a key must be the name of a setting.")
            continue
        path = f"{prefix}{key.value}"
        if path in lines:
            collected.problems.append(f"{origin}: {path} is already set on line {lines[path]}.")
        lines[path] = line
        if path in SECTIONS and isinstance(child, yaml.MappingNode):
            _read_mapping(file, loader, child, f"{path}.", collected)
            continue
        value = _value_of(loader, child)
        if path not in SECTIONS:
            collected.put(path, value, origin)
        elif value is not None:  # a section whose lines are all commented out reads as null
            problem = "it must be a section, with its settings indented below"
            collected.problems.append(f"{origin}: {path} is {value!r}; {problem}.")


def _value_of(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except ValueError:  # looks like a date but is not one: the rule rejects the text
        return getattr(node, "value", None)
