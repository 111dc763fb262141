"""Translates the options of `vllm serve` to settings, warnings, or refusals with reasons."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.cli.vllm_scan import ForeignOption, is_flag, read_json, read_number
from outrider.config import find_setting
from outrider.config.foreign import IGNORED, REFUSED, RefusedArgument, warn_of_ignored
from outrider.config.foreign_command import (
    COMMAND_IGNORED,
    COMMAND_PATHS,
    COMMAND_REFUSED,
    SPECULATIVE_SHORT,
)
from outrider.config.foreign_speculation import NAME as SPECULATIVE_CONFIG
from outrider.config.foreign_speculation import SPECULATIVE_PATHS, read_speculative
from outrider.config.kwargs import PATHS, settle
from outrider.config.sources import SourcedValue
from outrider.errors import ConfigError
from outrider.scheduler.params import MAX_LOGPROBS

logger = logging.getLogger(__name__)

# Names of commands take precedence: an LLM has no replicas.
_PATHS: Mapping[str, str] = {**PATHS, **COMMAND_PATHS}
_IGNORED: Mapping[str, str] = {**IGNORED, **COMMAND_IGNORED}
_REFUSED: Mapping[str, RefusedArgument] = {**REFUSED, **COMMAND_REFUSED}
_SAID_BY_CHECKPOINTS = (
    "compressed-tensors",
    "modelopt",
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
)
_MAX_SHOWN = 60


_META = "outrider.vllm_options"


@dataclass(slots=True)
class Translation:
    """The result for all options found."""

    values: dict[str, SourcedValue] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)  # the reason, by the option as written
    problems: list[str] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)  # the option with its value, by its name

    def log(self) -> None:
        """Log the options that became settings, and those without effect."""
        translated = [
            f"{self.shown[given.origin]} is {path}={_plain(path, given.value)}"
            for path, given in self.values.items()
        ]
        if translated:
            logger.info("vLLM options as settings: %s", ", ".join(translated))
        warn_of_ignored(self.ignored)


def translation_of(ctx: Any) -> Translation:
    """The translation of this call's command line."""
    found: Translation = ctx.meta.get(_META) or Translation()
    return found


def keep_translation(ctx: Any, found: Translation) -> None:
    ctx.meta[_META] = found


def translate(found: list[ForeignOption], *, starts_server: bool = True) -> Translation:
    """Raises nothing: refusals are in `problems`."""
    out = Translation()
    given: list[tuple[str, str, Any]] = []
    asks_clients = any(each.name == "ssl_cert_reqs" and each.value == "2" for each in found)
    for option in found:
        if option.name in COMMAND_PATHS and not starts_server:
            out.ignored[option.written] = "this command starts no server"
        elif option.name == "ssl_ca_certs" and not asks_clients:
            out.ignored[option.written] = "clients show no certificate without --ssl-cert-reqs 2"
        elif option.name == SPECULATIVE_CONFIG:
            given += _speculative(option, out)
        elif option.name in SPECULATIVE_SHORT:
            key = SPECULATIVE_SHORT[option.name]
            given += _speculative_key(option, key, out)
        elif option.name == "quantization" and option.value in _SAID_BY_CHECKPOINTS:
            out.ignored[option.written] = "the checkpoint itself says how it is quantized"
        elif option.name in _PATHS:
            given += _setting(option, _PATHS[option.name], out)
        elif option.name in _IGNORED:
            out.ignored[option.written] = _IGNORED[option.name]
        else:
            _refuse(option, _REFUSED[option.name], out)
    try:
        values, names = settle(given)
    except ConfigError as error:
        out.problems.append(str(error))
        return out
    out.values = {path: SourcedValue(value, names[path]) for path, value in values.items()}
    out.problems += _breaches(out.values)
    return out


def _breaches(values: Mapping[str, SourcedValue]) -> list[str]:
    """Invalid values, with the reason for those that vLLM accepts."""
    problems = []
    for path, given in values.items():
        rule = find_setting(path).rule
        problem = rule.breach(rule.settled(given.value))
        if problem is not None and path.endswith(".quantization"):
            problem = (
                f"is {given.value!r}; checkpoints quantized so are not read; take another, or "
                "give fp8 or int8, which round whole weights when they are loaded."
            )
        if path == "server.max_logprobs" and given.value == -1:
            problem = f"is -1; there is a bound, of at most {MAX_LOGPROBS}; give that."
        if problem is not None:
            problems.append(f"{given.origin} {problem}")
    return problems


def _refuse(option: ForeignOption, refused: RefusedArgument, out: Translation) -> None:
    value = option.value
    if isinstance(value, str):
        value = None if value == "None" else _bool_of(read_json(value), option.name)
    if value is None and option.value is None:
        out.problems.append(_without_value(option))
    elif refused.asks(value):
        shown = "" if isinstance(option.value, bool) else f" {_short(option.value)}"
        out.problems.append(f"{option.written}{shown}: {refused.reason}")


def _setting(option: ForeignOption, path: str, out: Translation) -> list[tuple[str, str, Any]]:
    rule = find_setting(path).rule
    value = option.value
    if value is None:
        out.problems.append(_without_value(option))
        return []
    if isinstance(value, list):
        value = tuple(value) if rule.kind is tuple or len(value) != 1 else value[0]
    if isinstance(value, tuple) and rule.kind is not tuple:
        shown = f"{len(value)} values" if rule.is_secret else _short(value)
        out.problems.append(f"{option.written} has {shown}, but {path} is one; give one.")
        return []
    if isinstance(value, dict):
        out.problems.append(f"{option.written} has keys, but {path} is one value; give that.")
        return []
    if isinstance(value, str):
        read = _READERS.get(option.name)
        value = rule.parse(value) if read is None else read(value)
    shown_value = "" if isinstance(option.value, bool) else f" {_plain(path, option.value)}"
    out.shown[option.written] = f"{option.written}{shown_value}"
    return [(option.written, path, value)]


def _speculative(option: ForeignOption, out: Translation) -> list[tuple[str, str, Any]]:
    config = option.value
    if isinstance(config, str):
        if config in ("", "None"):
            return []
        try:
            config = json.loads(config)
        except ValueError as error:
            out.problems.append(f"{option.written} {_short(config)} is invalid JSON: {error}.")
            return []
    if config is None:
        out.problems.append(_without_value(option))
        return []
    read = read_speculative(config, lambda key: f"{option.written}.{key}")
    out.problems += read.problems
    out.ignored |= read.ignored
    for name, _, value in read.values:
        out.shown[name] = f"{name} {_short(value)}"
    return read.values


def _speculative_key(
    option: ForeignOption, key: str, out: Translation
) -> list[tuple[str, str, Any]]:
    """An option that is one key of `speculative_config`."""
    if option.value is None:
        out.problems.append(_without_value(option))
        return []
    rule = find_setting(SPECULATIVE_PATHS[key]).rule
    text = str(option.value)
    value = text if rule.kind is str else rule.parse(text)
    read = read_speculative({key: value}, lambda _: option.written)
    out.problems += read.problems
    out.shown[option.written] = f"{option.written} {text}"
    return read.values


def _model_len(text: str) -> Any:
    """None means the checkpoint's limit."""
    if text.strip().lower() in ("-1", "auto"):
        return None
    return _number(text)


def _number(text: str) -> Any:
    number = read_number(text)
    return text if number is None else number


def _names(text: str) -> Any:
    """A JSON list, or comma-separated names."""
    value = read_json(text)
    return tuple(value) if isinstance(value, list) else find_setting(_ORIGINS).rule.parse(text)


_ORIGINS = "server.cors_origins"
_READERS: Mapping[str, Callable[[str], Any]] = {
    "max_model_len": _model_len,
    "max_num_batched_tokens": _number,
    "allowed_origins": _names,
}


def _bool_of(value: Any, name: str) -> Any:
    """The value of a flag written with "="."""
    return str(value).lower() == "true" if is_flag(name) and isinstance(value, str) else value


def _without_value(option: ForeignOption) -> str:
    return f"{option.written} has no value; give one."


def _plain(path: str, value: Any) -> str:
    if find_setting(path).rule.is_secret:
        return "(not shown)"
    return "none" if value is None else _short(value)


def _short(value: Any) -> str:
    """As written, truncated."""
    if isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
