"""Reads a chaos file: a YAML list of faults to inject.

- at: 20s
  do: kill            # kill, term, stop or continue
  what: draft         # draft, target, engine, gateway, server, or one rank
- at: 40s
  do: stop
  for: 5s             # then continue
  what: {role: target, rank: 0}
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider.errors import ConfigError
from outrider.input_files import settings_text, shown
from outrider.loadtest.units import UNITS_S

SIGNALS: Mapping[str, signal.Signals] = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
}
ROLES = ("draft", "target", "engine")  # restarted by the server
PARTS = (*ROLES, "gateway", "server")
GROUPS = ("draft", "target")  # roles with ranks
_FIELDS = ("at", "do", "what", "for")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h)?")
_LONGEST = 1e6


@dataclass(frozen=True, slots=True)
class ChaosTarget:
    """A role with all its ranks or one of them, the gateway, or the whole server."""

    role: str
    rank: int | None = None

    def __str__(self) -> str:
        return self.role if self.rank is None else f"{self.role} {self.rank}"


@dataclass(frozen=True, slots=True)
class PlannedEvent:
    """One event, `at_s` seconds after the start of the load."""

    at_s: float
    do: str
    what: ChaosTarget
    for_s: float | None = None


def read_chaos(path: Path) -> list[PlannedEvent]:
    """The events sorted by time; raises `ConfigError` with every mistake and its line."""
    try:
        loader = yaml.SafeLoader(settings_text(path))
        root = loader.get_single_node()
        if not isinstance(root, yaml.SequenceNode) or not root.value:
            raise ConfigError(f"{path}:1: it must be a list of events, such as '- at: 20s'.")
        rows = [
            (node.start_mark.line + 1, loader.construct_object(node, deep=True))
            for node in root.value
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read ({error}); give a YAML file.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        reason = getattr(error, "problem", None) or error
        raise ConfigError(f"{place}: this is not valid YAML: {reason}.") from None
    events, problems = [], []
    for line, row in rows:
        try:
            events.append(_event(row))
        except ConfigError as error:
            problems.append(f"{path}:{line}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return sorted(events, key=lambda event: event.at_s)


def _event(row: Any) -> PlannedEvent:
    if not isinstance(row, dict):
        raise ConfigError(f"an event is {shown(row)}; it must have 'at', 'do' and 'what'.")
    if unknown := [name for name in row if name not in _FIELDS]:
        raise ConfigError(
            f"{shown(unknown[0])} is not a field of an event; use {', '.join(_FIELDS)}."
        )
    if missing := [name for name in _FIELDS[:3] if name not in row]:
        raise ConfigError(f"the event has no {missing[0]!r}; add it.")
    if not isinstance(row["do"], str) or row["do"] not in SIGNALS:
        raise ConfigError(f"do is {shown(row['do'])}; use {', '.join(SIGNALS)}.")
    if "for" in row and row["do"] != "stop":
        raise ConfigError(f"'for' is given with do: {row['do']}; only 'stop' has a length.")
    for_s = _seconds("for", row["for"]) if "for" in row else None
    return PlannedEvent(_seconds("at", row["at"]), row["do"], _part(row["what"]), for_s)


def _seconds(field: str, value: Any) -> float:
    found = _TIME.fullmatch(str(value)) if isinstance(value, str | int | float) else None
    if found is None or float(found[1]) > _LONGEST:
        raise ConfigError(f"{field} is {shown(value)}; give a time, as 20s, 1.5min or 2h.")
    return float(found[1]) * UNITS_S[found[2] or ""]


def _part(value: Any) -> ChaosTarget:
    if isinstance(value, dict):
        role, rank = value.get("role"), value.get("rank")
        is_rank = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
        if set(value) != {"role", "rank"} or role not in GROUPS or not is_rank:
            raise ConfigError(f"what is {shown(value)}; name a rank as {{role: target, rank: 0}}.")
        return ChaosTarget(role, rank)
    if value not in PARTS:
        raise ConfigError(
            f"what is {shown(value)}; use {', '.join(PARTS)}, or a rank as "
            "{role: target, rank: 0}."
        )
    return ChaosTarget(value)
