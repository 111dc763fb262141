"""A rank whose passes take set times; see `outrider.benchmarks.draft_ahead`.

The models, links and protocol are real; a pass sleeps until its time is over.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any, NamedTuple

from outrider.kernels.types import DraftTokens
from outrider.workers.__main__ import main as run_worker
from outrider.workers.proposers.draft_ahead import DraftAhead
from outrider.workers.runner import Runner

VARIABLE = "OUTRIDER_PACE"


class Pace(NamedTuple):
    """Seconds of one pass of each role, and behind how many outcomes the draft drafts ahead."""

    target: float
    draft: float
    max_branches: int


def set_pace(pace: Pace) -> None:
    """For the ranks that this process starts."""
    os.environ[VARIABLE] = json.dumps(pace)


def _take(seconds: float, method: Any) -> Any:
    """The method, taking at least so long for each pass."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        found = method(*args, **options)
        if found is not None:
            num_passes = len(found.tokens) if isinstance(found, DraftTokens) else 1
            time.sleep(max(start_s + seconds * num_passes - time.perf_counter(), 0.0))
        return found

    return run


def main() -> None:
    pace = Pace(*json.loads(os.environ[VARIABLE]))
    DraftAhead.max_branches = pace.max_branches
    seconds = pace.draft if "draft" in sys.argv else pace.target
    for name in ("forward", "score", "best", "guess"):
        setattr(Runner, name, _take(seconds, getattr(Runner, name)))
    run_worker()


if __name__ == "__main__":
    main()
