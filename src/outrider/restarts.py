"""Restart back-off, and the log lines about it.

The same for engines and drafts, whether they are child processes or Ray actors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

FIRST_PAUSE_S = 0.5  # after the second failure in a row
LONGEST_PAUSE_S = 30.0


class Restarts:
    """Restart back-off of one process. Only its first start may fail for good: what has run once is
    restarted forever.

    After a long run the restart is immediate; the pause doubles with every further failure.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, is_first: bool = True
    ) -> None:
        self.is_first = is_first  # it has not run yet
        self._clock = clock
        self._pause_s = 0.0
        self._started_s = clock()
        self._lost_s: float | None = clock()

    def runs(self) -> float:
        """It runs from now on; returns the seconds of downtime."""
        now_s = self._clock()
        away_s = 0.0 if self._lost_s is None else now_s - self._lost_s
        self.is_first, self._started_s, self._lost_s = False, now_s, None
        return away_s

    def lost(self) -> float:
        """It has failed or ended; returns the seconds to wait before the restart."""
        now_s = self._clock()
        if self._lost_s is None:
            self._lost_s = now_s
        if now_s - self._started_s > LONGEST_PAUSE_S:
            self._pause_s = 0.0
        pause_s = self._pause_s
        self._pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        return pause_s


def draft_lost(reason: str, pause_s: float) -> str:
    what = f"draft lost, decoding goes on without it: {reason.rstrip('.')}"
    return f"{what}; restarting in {pause_s:g} s"


def draft_back(away_s: float, pids: Sequence[int]) -> str:
    return f"draft back after {away_s:.1f} s (pid {', '.join(map(str, pids))})"


def engine_lost(reason: str, pause_s: float, *, do_others_serve: bool = False) -> str:
    """`do_others_serve`: other replicas continue its requests."""
    requests = "its requests go on elsewhere" if do_others_serve else "running requests wait"
    what = f"restarting engine and models in {pause_s:g} s, {requests}"
    return f"{reason.rstrip('.')}; {what}"


def engine_back(away_s: float, pids: Mapping[str, Sequence[int]]) -> str:
    """`pids` are those of the processes with the models, by role."""
    who = [f"{role} pid {' '.join(map(str, each))}" for role, each in pids.items()]
    return f"serving again after {away_s:.1f} s ({', '.join(who)})"
