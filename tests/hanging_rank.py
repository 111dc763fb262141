"""A rank whose main thread hangs for good once it gets SIGUSR2; otherwise one like any other.

Python runs signal handlers on the main thread, so the hang begins wherever that thread is, and the
thread that sends heartbeats goes on unless the hang holds the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

from outrider.workers.__main__ import main
from outrider.workers.ranks import watch

HANG_VARIABLE = "HANGING_RANK_KIND"
HANGS: dict[str, Callable[[], object]] = {
    "python": lambda: time.sleep(3600),
    "kernel": lambda: ctypes.CDLL(None).sleep(3600),
    "kernel that holds the lock": lambda: ctypes.PyDLL(None).sleep(3600),
}


if __name__ == "__main__":
    hang = HANGS[os.environ[HANG_VARIABLE]]
    signal.signal(signal.SIGUSR2, lambda *_: hang())
    watch.GRACE_S = 1.0
    main()
