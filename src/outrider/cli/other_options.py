"""Options that a command has not, but that a setting or an argument of vLLM's stands behind."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from outrider.config import find_setting
from outrider.config.foreign import (
    COMMAND_IGNORED,
    COMMAND_PATHS,
    COMMAND_REFUSED,
    IGNORED,
    REFUSED,
)
from outrider.config.kwargs import PATHS
from outrider.errors import ConfigError

# A command knows more than an LLM, which has no replicas, so its own names come first.
_PATHS = {**PATHS, **COMMAND_PATHS}
_IGNORED = {**IGNORED, **COMMAND_IGNORED}
_REFUSED = {**{name: each.reason for name, each in REFUSED.items()}, **COMMAND_REFUSED}


class SettingsCommand(TyperCommand):
    """A command with a configuration: an option it has not is answered with the setting meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            sentence = other_option(getattr(error, "option_name", None) or "", given)
            if sentence is None:
                raise
            raise ConfigError(sentence) from None


def other_option(option: str, args: list[str]) -> str | None:
    """What to give in place of an option that is not there, if anybody knows."""
    name = option.removeprefix("--").replace("-", "_")
    if not option.startswith("--") or not name:
        return None
    if name == "speculative_config":
        return (
            f"there is no option {option}; give --draft-model, --method and "
            "--num-speculative-tokens, or --set with their settings."
        )
    path = _PATHS.get(name) or _PATHS.get(name.removeprefix("no_"))
    if path is None and name in _IGNORED:
        return f"there is no option {option}, as {_IGNORED[name]}; leave it out."
    if path is None and name in _REFUSED:
        return f"there is no option {option}: {_REFUSED[name]}"
    if path is None:
        return None
    setting, value = find_setting(path), _value_of(option, args) or "VALUE"
    if isinstance(setting.default, bool):
        value = "true" if name in _PATHS else "false"
    elif setting.rule.is_secret:
        value = "VALUE"
    return f"there is no option {option}; give --set {path}={value} instead."


def _value_of(option: str, args: list[str]) -> str | None:
    """What was given with it."""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        if arg.startswith(f"{option}="):
            return arg.removeprefix(f"{option}=")
        if arg == option:
            return None if following.startswith("-") else following
    return None
