"""How long to wait before something that failed is started again."""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Backoff:
    """Pauses that double with every failure, and begin anew after something has worked a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._started_s = clock()

    def started(self) -> None:
        """It runs, from now on."""
        self._started_s = self._clock()

    def next_pause_s(self) -> float:
        """It has failed: how long to wait this time."""
        if self._clock() - self._started_s > LONGEST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s
