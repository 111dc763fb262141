"""A rank that ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: the tie to a parent cannot be undone. `sys.argv` is the parent it
# believes to have, and the one it was told.
TIED = """
import os, sys
told = int(sys.argv[2])
if sys.argv[1] != "real":
    os.getppid = lambda: int(sys.argv[1])
from outrider.workers.__main__ import end_with
end_with(told)
print("lives")
"""


def _tied(parent: str, told: int) -> tuple[int, str, str]:
    command = [sys.executable, "-c", TIED, parent, str(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
def test_the_first_process_of_a_container_may_start_ranks() -> None:
    assert _tied("1", 1) == (0, "lives\n", "")


@pytest.mark.thorough
def test_an_orphan_ends_whoever_has_adopted_it() -> None:
    assert _tied("real", 1) == (1, "", "error: the starting process has ended.\n")
