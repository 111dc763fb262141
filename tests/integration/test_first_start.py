"""The first start on a machine says what it waits for, in one line each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_tools import ServeProcess

from outrider.kernels.cpu import build

pytestmark = pytest.mark.model

SMALL = "smollm2-135m-draft"
COMPILING = rf"compiling CPU kernels \(0 of {len(list(build._SOURCE_DIR.glob('*.c')))}\)"


@pytest.fixture
def slow_machine(tmp_path: Path) -> dict[str, str]:
    """Its compiler takes longer than a wait that needs no line, and then fails: a whole one takes
    half a minute."""
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\nsleep 5\nexit 1\n")
    compiler.chmod(0o755)
    path = f"{compiler.parent}:{os.environ['PATH']}"
    return {"PATH": path, "OUTRIDER_CACHE": str(tmp_path / "cache")}


@pytest.mark.timeout(300)
def test_a_server_says_what_it_waits_for(slow_machine: dict[str, str]) -> None:
    options = ("--no-ray", "--model", SMALL, "--draft-model", SMALL, "--set", "target.device=cpu")
    with ServeProcess(*options, environment=slow_machine) as server, server.wait_ready():
        lines = [line.rstrip() for line in server.lines]
    seconds = r"^ *[\d.]+ s  "
    assert [line for line in lines if re.search(seconds + COMPILING + "$", line)], lines
    for role in ("target", "draft"):  # which try again, one after the other
        own = rf"{seconds}{role} rank 0 \(pid \d+\): ({COMPILING}|waiting for another process to)"
        assert len([line for line in lines if re.search(own, line)]) == 1, lines


def test_a_command_says_what_it_waits_for(slow_machine: dict[str, str]) -> None:
    command = [sys.executable, "-m", "outrider", "generate", "Hello", "--model", SMALL]
    options = ["--max-tokens", "2", "--set", "cache.kv_cache_gb=0.1", "--set", "target.device=cpu"]
    environment = os.environ | slow_machine
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if re.fullmatch(COMPILING, line)]
    assert len(found) == 1, done.stderr
