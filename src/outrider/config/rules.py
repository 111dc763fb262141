"""Rules of settings: allowed values, validation and error messages."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError


class FieldError(ConfigError):
    """A setting breaks its rule. `paths` are the settings at fault, likeliest first.

    `problem` excludes the name, so that a caller can name the value as the user wrote it: a line of
    a file, a variable, a keyword argument.
    """

    def __init__(self, paths: tuple[str, ...], problem: str, name: str | None = None) -> None:
        super().__init__(f"{name or paths[0]} {problem}")
        self.paths = paths
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Rule:
    """Allowed values of a setting. `expected` completes the sentence "it must be ..."."""

    kind: type[bool] | type[int] | type[float] | type[str] | type[tuple[str, ...]]
    expected: str
    accepts: Callable[[Any], bool]
    optional: bool = False
    is_secret: bool = False  # never shown, neither by `config show` nor by a server

    def breach(self, value: Any) -> str | None:
        """The problem with the value, to follow the setting's name; None if it is valid."""
        if self._holds(value):
            return None
        return f"is {self.shown(value)}; it must be {self.expected}."

    def shown(self, value: Any) -> str:
        """The value for a message; secrets are masked."""
        return "not as it should be" if self.is_secret else repr(value)

    def settled(self, value: Any) -> Any:
        """The normalized value: a single name becomes a list of one."""
        if self.kind is tuple and isinstance(value, str | list):
            return (value,) if isinstance(value, str) else tuple(value)
        return value

    def _holds(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool):  # an int to Python, but not to users
            return self.kind is bool
        if self.kind is float and isinstance(value, int | float):
            return abs(value) < math.inf and self.accepts(value)
        return isinstance(value, self.kind) and self.accepts(value)

    def parse(self, text: str) -> Any:
        """Parse a value from a flag or the environment.

        Text that cannot be parsed is returned unchanged: validation then rejects it with the same
        message as a wrong value from anywhere else.
        """
        word = text.strip().lower()
        if self.optional and word in ("", "none", "null"):
            return None
        if self.kind is bool:
            return _BOOL_WORDS.get(word, text)
        if self.kind is str:
            return text.strip()
        if self.kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        try:
            return self.kind(word)
        except ValueError:
            return text


_BOOL_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the configuration."""

    path: str  # "target.model", or "seed" for a field outside sections
    default: Any
    rule: Rule
    doc: str

    @property
    def env_name(self) -> str:
        return "OUTRIDER_" + self.path.replace(".", "_").upper()

    @property
    def env_names(self) -> tuple[str, ...]:
        """All variables that set it."""
        return self.env_name, *_ENV_ALIASES.get(self.path, ())


# A short name for a setting that clients and servers share.
_ENV_ALIASES = {"server.api_key": ("OUTRIDER_API_KEY",)}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append after a full stop: the closest known name, or nothing if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def setting(default: Any, rule: Rule, doc: str) -> Any:
    return dataclasses.field(
        default=default, repr=not rule.is_secret, metadata={"rule": rule, "doc": doc}
    )


def _or_unset(expected: str, optional: bool) -> str:
    return f"{expected}, or unset" if optional else expected


def whole(low: int, high: int | None = None, *, optional: bool = False) -> Rule:
    expected = (
        f"a whole number >= {low}" if high is None else f"a whole number from {low} to {high}"
    )
    top = math.inf if high is None else high
    return Rule(int, _or_unset(expected, optional), lambda v: low <= v <= top, optional)


def choice(*names: str, optional: bool = False) -> Rule:
    expected = f"{', '.join(repr(name) for name in names[:-1])} or {names[-1]!r}"
    return Rule(str, _or_unset(expected, optional), lambda v: v in names, optional)


def text_rule(expected: str, *, optional: bool = False) -> Rule:
    return Rule(str, _or_unset(expected, optional), lambda v: bool(v.strip()), optional)


def names_rule(expected: str) -> Rule:
    """A list of texts; comma-separated in a flag or a variable."""
    return Rule(
        tuple, expected, lambda v: all(isinstance(each, str) and each.strip() for each in v)
    )


FLAG = Rule(bool, "true or false", lambda v: True)
POSITIVE = Rule(float, "a number > 0", lambda v: v > 0)
NOT_NEGATIVE = Rule(float, "a number >= 0", lambda v: v >= 0)


class Validated:
    """Validates every field against its rule on construction; sections add checks across fields."""

    __slots__ = ()
    _section = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            rule: Rule | None = item.metadata.get("rule")
            if rule is None:
                continue
            value = rule.settled(getattr(self, item.name))
            object.__setattr__(self, item.name, value)  # the only place that normalizes
            problem = rule.breach(value)
            if problem is not None:
                raise FieldError((self._section + item.name,), problem)
        self._check_together()

    def _check_together(self) -> None:
        """Checks across fields."""
