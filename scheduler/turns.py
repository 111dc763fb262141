"""Whether the next step is exclusive or ordinary.

A request that the captured passes of a device cannot serve runs uncaptured, in exclusive steps that
take several times as long. They are scheduled by time, not by count: each request gets the same
share of time.
"""

from __future__ import annotations

LEAST_SHARE = 0.03
"""Of the time, however few requests are exclusive: ordinary ones hardly notice, and a single
exclusive request makes progress."""
_LEAST_S = 1e-4  # of a step; workers may report no time


class Turns:
    """Exclusive steps wait until the time they took beyond their share has passed."""

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._share = LEAST_SHARE
        self._is_under_way = False  # an exclusive step, of unknown length

    def is_exclusive_next(self, num_exclusive: int, num_others: int) -> bool:
        if not num_exclusive:
            return False
        if not num_others:
            self._share = 1.0
            return True
        self._share = max(num_exclusive / (num_exclusive + num_others), LEAST_SHARE)
        return self._debt_s <= 0 and not self._is_under_way

    def begin(self, is_exclusive: bool) -> None:
        self._is_under_way |= is_exclusive

    def end(self, is_exclusive: bool, seconds: float) -> None:
        """A step took `seconds`."""
        seconds = max(seconds, _LEAST_S)
        spent_s = seconds if is_exclusive else 0.0
        # Credit is at most one step: unused turns are not saved up.
        self._debt_s = max(self._debt_s + spent_s - self._share * seconds, -seconds)
        if is_exclusive:
            self._is_under_way = False
