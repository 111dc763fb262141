"""How long tests wait. A test that passes never waits until its limit, so limits are told as for a
quiet machine and stretched: on a crowded one a server takes fifteen times as long to start."""

from __future__ import annotations

import time
from collections.abc import Callable

_STRETCH = 4.0
_POLL_S = 0.01


def stretched(limit_s: float) -> float:
    return limit_s * _STRETCH


def wait_until(
    condition: Callable[[], object],
    limit_s: float = 60.0,
    explain: Callable[[], str] = lambda: "it did not come about",
) -> None:
    began_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began_s
        assert waited_s < stretched(limit_s), f"{explain()} (within {waited_s:.0f} s)"
        time.sleep(_POLL_S)
