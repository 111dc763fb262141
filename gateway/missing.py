"""Replicas that were lost together with their controllers, and should be there."""

from __future__ import annotations

import time
from collections.abc import Iterator

# A replica that nobody has replaced for so long is taken for one that was removed.
FORGET_S = 24 * 3600.0
MOST = 256


class MissingReplicas:
    """Their names, from their loss until others come that have the same, whatever controller those
    belong to."""

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
        if len(self._lost_s) > MOST:
            del self._lost_s[next(iter(self._lost_s))]

    def find(self, name: str) -> None:
        """Another replica has the name now: the one that was lost first counts as replaced."""
        lost = next((each for each in self._lost_s if short_name(each) == short_name(name)), None)
        if lost is not None:
            del self._lost_s[lost]


def short_name(name: str) -> str:
    """Without the name of the controller."""
    return name.rpartition("/")[2]
