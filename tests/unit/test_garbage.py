"""What a process has loaded is not searched again."""

from __future__ import annotations

import subprocess
import sys

_CHILD = """
import gc
from outrider.garbage import leave_out_what_is_loaded
loaded = [[] for _ in range(1000)]
leave_out_what_is_loaded()
came_later = []
known = {id(each) for each in gc.get_objects()}
print(id(loaded[0]) in known, id(came_later) in known, gc.isenabled())
"""


def test_only_what_came_later_is_searched() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, check=True, timeout=60
    )
    assert told.stdout.split() == [b"False", b"True", b"True"]
