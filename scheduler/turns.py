"""Whose step is next, where some requests cannot share one with others.

What the recorded passes of a device cannot do for a request is done by other means, in steps that
take several times as long. Such requests have these steps for themselves, as often as their share
of the time allows: everybody gets the same time, not the same number of steps.
"""

from __future__ import annotations

LEAST_SHARE = 0.03
"""Of the time, whatever the number of those apart: so few of many others hardly notice, and even a
single one goes on."""
_LEAST_S = 1e-4  # of a step; workers may not measure


class Turns:
    """What those apart have taken beyond their share has to pass before they are next."""

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._share = LEAST_SHARE
        self._is_under_way = False  # a step of theirs, of unknown length

    def is_apart_next(self, num_apart: int, num_others: int) -> bool:
        if not num_apart:
            return False
        if not num_others:
            self._share = 1.0
            return True
        self._share = max(num_apart / (num_apart + num_others), LEAST_SHARE)
        return self._debt_s <= 0 and not self._is_under_way

    def begin(self, is_apart: bool) -> None:
        self._is_under_way |= is_apart

    def end(self, is_apart: bool, seconds: float) -> None:
        """A step took so long."""
        seconds = max(seconds, _LEAST_S)
        spent_s = seconds if is_apart else 0.0
        # What is owed to them is no more than a step: nobody saves up turns.
        self._debt_s = max(self._debt_s + spent_s - self._share * seconds, -seconds)
        if is_apart:
            self._is_under_way = False
