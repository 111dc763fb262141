"""Finds the options of `vllm serve` in a command line, in every form that vLLM accepts.

`--max-model-len 32k`, `--max_model_len=32k`, `-tp 2`, `--no-enable-prefix-caching`, `-O3`,
`--speculative-config.method ngram`. The command's own options are left to its own parser, under
their own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.config import find_setting
from outrider.config.foreign import IGNORED, REFUSED
from outrider.config.foreign_command import (
    COMMAND_IGNORED,
    COMMAND_PATHS,
    COMMAND_REFUSED,
    FLAGS,
    LISTS,
    OPTIONAL,
    SHORT,
    SPECULATIVE_SHORT,
)
from outrider.config.foreign_speculation import NAME as SPECULATIVE_CONFIG
from outrider.config.kwargs import PATHS

KNOWN = frozenset(
    (
        *(*PATHS, *IGNORED, *REFUSED, *COMMAND_PATHS, *COMMAND_IGNORED, *COMMAND_REFUSED),
        *(*SPECULATIVE_SHORT, SPECULATIVE_CONFIG),
    )
)
"""Every known option, named as a Python argument."""
_COMMA_LISTS = ("served_model_name",)  # one word for the command's own parser
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_KEYS = r"(\.(?P<keys>[^=]*?)(?P<adds>\+?))?"
_LONG = re.compile(rf"--(?P<name>[A-Za-z][\w-]*){_KEYS}(=(?P<value>.*))?", re.DOTALL)
# After a short option only a number may follow without a separator.
_SHORT = re.compile(rf"(?P<name>-[A-Za-z]+){_KEYS}((=|(?=\d))(?P<value>.*))?", re.DOTALL)
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(slots=True)
class ForeignOption:
    """An option of vLLM that the command itself does not have."""

    name: str  # as a Python argument
    written: str  # without its value
    value: Any = None  # str, bool, list of str, dict of dotted keys, or None


@dataclass(slots=True)
class ScanResult:
    args: list[str] = field(default_factory=list)  # for the command's own parser
    found: list[ForeignOption] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # neither the command's own nor vLLM's


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """The declared options of a command: whether each takes a value."""

    takes_value: Mapping[str, bool]

    @classmethod
    def of(cls, command: Any) -> OwnOptions:
        found = {"--help": False}
        for param in command.params:
            if param.param_type_name == "option":
                is_flag = bool(param.is_flag or param.count)
                found |= dict.fromkeys((*param.opts, *param.secondary_opts), not is_flag)
        return cls(found)


def scan(args: list[str], own: OwnOptions) -> ScanResult:
    """Split vLLM's options from the command's own; everything after `--` is the command's."""
    return _OptionScanner(args, own).run()


class _OptionScanner:
    def __init__(self, args: list[str], own: OwnOptions) -> None:
        self._rest = list(reversed(args))
        self._own = own
        self._out = ScanResult()
        self._has_model = False

    def run(self) -> ScanResult:
        while self._rest:
            word = self._rest.pop()
            if word == "--":
                self._out.args += [word, *reversed(self._rest)]
                break
            if not word.startswith("-") or word == "-" or not self._option(word):
                self._keep(word)
        return self._out

    def _keep(self, word: str) -> None:
        """Leave a word and its value to the command's own parser."""
        self._out.args.append(word)
        name, has_value, _ = word.partition("=")
        self._has_model |= not word.startswith("-") or name in ("--model", "-m")
        if self._own.takes_value.get(name) and not has_value and self._rest:
            self._out.args.append(self._rest.pop())

    def _option(self, word: str) -> bool:
        """Handle a vLLM option; whether the word was one."""
        if word in self._own.takes_value and not word.startswith("--"):
            return False
        match = _LONG.fullmatch(word)
        name = None
        if match is not None:
            name = self._long_name(match["name"].replace("-", "_"), word)
        elif (match := _SHORT.fullmatch(word)) is not None:
            name = SHORT.get(match["name"])
        if match is None or name is None:
            return False
        return self._take(name, match)

    def _long_name(self, name: str, word: str) -> str | None:
        """The full name of an option; accepts an unambiguous prefix."""
        long = "--" + name.replace("_", "-")
        negated = name.removeprefix("no_")
        is_off = negated != name and negated in KNOWN and is_flag(negated)
        if name in KNOWN or is_off or long in self._own.takes_value:
            return name
        own = {option[2:].replace("-", "_") for option in self._own.takes_value if option[1] == "-"}
        matches = sorted(each for each in KNOWN | own if each.startswith(name))
        if len(matches) == 1:
            return matches[0]
        self._out.unknown.append(word.partition("=")[0])
        return None

    def _take(self, name: str, match: re.Match[str]) -> bool:
        long = "--" + name.replace("_", "-")
        value = match["value"]
        if long in self._own.takes_value and match["keys"] is None:
            self._rewrite(name, long, value)
            return True
        written = match[0].partition("=")[0]
        if match["name"] in SHORT and match["keys"] is None:
            written = match["name"]  # without an attached number
        if match["keys"] is not None:
            self._dotted(name, match["name"], match, value)
            return True
        is_off = name not in KNOWN and name.startswith("no_")
        name = name.removeprefix("no_") if is_off else name
        # As in vLLM, the last one wins.
        self._out.found = [each for each in self._out.found if each.name != name]
        self._out.found.append(ForeignOption(name, written, self._value(name, value, is_off)))
        return True

    def _rewrite(self, name: str, long: str, value: str | None) -> None:
        """Pass one of the command's own options on, under its own name."""
        if not self._own.takes_value[long]:
            self._out.args.append(long if value is None else f"{long}={value}")
            return
        self._has_model |= long == "--model"
        if value is None and self._rest:
            value = self._rest.pop()
        # Without a model so far, a word after the first value is the model.
        more = list(self._words()) if name in LISTS and self._has_model else []
        if more and name in _COMMA_LISTS:
            value = ",".join([value or "", *more])
        elif more:
            self._out.found.append(ForeignOption(name, long, [value, *more]))
            return
        self._out.args += [long] if value is None else [long, value]

    def _value(self, name: str, value: str | None, is_off: bool) -> Any:
        if is_flag(name):
            return not is_off if value is None else value
        if name in LISTS:
            return ([] if value is None else [value]) + list(self._words())
        if value is None and self._rest and _is_value(self._rest[-1]):
            value = self._rest.pop()
        return True if value is None and name in OPTIONAL else value

    def _words(self) -> Iterator[str]:
        while self._rest and _is_value(self._rest[-1]):
            yield self._rest.pop()

    def _dotted(self, name: str, begins: str, match: re.Match[str], value: str | None) -> None:
        """One key of a JSON value; the keys of an option are merged."""
        if value is None and self._rest:
            value = self._rest.pop()
        inner: Any = read_json(value or "")
        if match["adds"]:
            inner = (value or "").split(",")
        *outer, last = match["keys"].split(".")
        found = next((f for f in self._out.found if f.name == name), None)
        if found is None or not isinstance(found.value, dict):
            found = ForeignOption(name, begins if begins in SHORT else f"--{begins}", {})
            self._out.found.append(found)
        place: dict[str, Any] = found.value
        for key in outer:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        if match["adds"] and isinstance(place.get(last), list):
            inner = [*place[last], *inner]
        place[last] = inner


def is_flag(name: str) -> bool:
    """Whether an option takes no value."""
    path = COMMAND_PATHS.get(name) or PATHS.get(name)
    return name in FLAGS or (path is not None and find_setting(path).rule.kind is bool)


def read_json(text: str) -> Any:
    """A JSON value, a number with a suffix, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        number = read_number(text)
        return text if number is None else number


def read_number(text: str) -> int | None:
    """A whole number as vLLM reads it: 32k is 32000, 32K is 32768."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if found is None or ("." in found[1] and found[2] not in _SUFFIXES):
        return None
    if found[2] in _SUFFIXES:
        return int(float(found[1]) * _SUFFIXES[found[2]])
    return int(found[1]) * _BINARY.get(found[2], 1)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _NUMBER.fullmatch(word) is not None
