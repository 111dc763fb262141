"""Replicas that were lost together with their controllers and count as configured still."""

from __future__ import annotations

import time
from collections.abc import Iterator

# A replica that was not replaced for a day counts as removed.
FORGET_S = 24 * 3600.0
MAX_MISSING = 256


class MissingReplicas:
    """Names of lost replicas, each until a replica of the same name appears, of any controller."""

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}  # by name, the oldest first

    def __iter__(self) -> Iterator[str]:
        oldest_s = time.monotonic() - FORGET_S
        self._lost_s = {name: at_s for name, at_s in self._lost_s.items() if at_s > oldest_s}
        return iter(sorted(self._lost_s))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def lose(self, name: str) -> None:
        self._lost_s[name] = time.monotonic()
        if len(self._lost_s) > MAX_MISSING:
            del self._lost_s[next(iter(self._lost_s))]

    def find(self, name: str) -> None:
        """A replica with this name is up: the one lost first counts as replaced."""
        lost = next((each for each in self._lost_s if short_name(each) == short_name(name)), None)
        if lost is not None:
            del self._lost_s[lost]


def short_name(name: str) -> str:
    """Without the name of the controller."""
    return name.rpartition("/")[2]
