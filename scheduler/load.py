"""How many requests come and go, and whether those that run are the last for now."""

from __future__ import annotations

from collections import deque

_ARRIVALS = 64
_RECENT = 8  # arrivals
_END_WEIGHT = 0.05  # in the mean residence
_LATE = 8.0  # times as long without an arrival as it takes in a steady load


class Load:
    """`now_s` is the time of the step."""

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)
        self._residence_s = 0.0
        self._num_ended = 0
        self.now_s = 0.0
        self.is_complete = False  # no more requests will come, as the caller says

    def observe_arrival(self, arrival_s: float) -> None:
        self._arrivals.append(arrival_s)

    def observe_end(self, arrival_s: float) -> None:
        self._num_ended += 1
        spent_s = max(self.now_s - arrival_s, 0.0)
        weight = max(_END_WEIGHT, 1 / self._num_ended)
        self._residence_s += weight * (spent_s - self._residence_s)

    @property
    def arrivals_per_s(self) -> float:
        """Over the last arrivals; falls while none comes."""
        if len(self._arrivals) < 2:
            return 0.0
        window_s = max(self.now_s, self._arrivals[-1]) - self._arrivals[0]
        return len(self._arrivals) / window_s if window_s > 0 else 0.0

    @property
    def share(self) -> float:
        """Of the seats that requests would occupy at their arrival rate."""
        return self.arrivals_per_s * self._residence_s / self._seats

    def is_draining(self, num_running: int, num_waiting: int) -> bool:
        """Whether requests that end are not replaced: in a steady load one comes for each."""
        if num_waiting:
            return False
        if self.is_complete:
            return True
        if not self._arrivals or not self._num_ended:
            return False
        last_s, recent = self._arrivals[-1], min(_RECENT, len(self._arrivals) - 1)
        gap_s = (last_s - self._arrivals[-1 - recent]) / max(recent, 1)
        steady_s = max(self._residence_s / max(num_running, 1), gap_s)  # between arrivals
        return self.now_s - last_s > _LATE * steady_s
