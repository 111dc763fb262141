"""Ray's process that starts Ray on other hosts, begun anew so that it knows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from outrider.cluster.deploy.head_monitor import renew_monitor

# Notes who it is, whenever it starts.
MONITOR = """
import os, sys, time
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"{os.getpid()} {sys.argv[1:]}\\n")
time.sleep(60)
"""


def notes_of(path: Path, number: int) -> list[tuple[int, str]]:
    deadline_s = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert time.monotonic() < deadline_s, "it did not start"
        time.sleep(0.05)
    lines = [line.partition(" ") for line in path.read_text().splitlines()]
    return [(int(pid), arguments) for pid, _, arguments in lines]


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    program = tmp_path / "ray" / "autoscaler" / "_private" / "monitor.py"
    program.parent.mkdir(parents=True)
    program.write_text(MONITOR)
    path = tmp_path / "notes"
    command = [sys.executable, str(program), "--autoscaling-config=~/ray_bootstrap_config.yaml"]
    started = subprocess.Popen(command, env=os.environ | {"NOTES": str(path)})
    yield path
    for pid, _ in notes_of(path, 1):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    started.wait(60)


def test_it_is_begun_anew_with_what_it_was_begun_with(notes: Path) -> None:
    ((first, arguments),) = notes_of(notes, 1)
    assert renew_monitor()
    _, (second, again) = notes_of(notes, 2)
    assert second != first
    assert again == arguments == "['--autoscaling-config=~/ray_bootstrap_config.yaml']"
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
        os.waitpid(first, os.WNOHANG)
        os.kill(first, 0)
