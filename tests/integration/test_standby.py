"""Engines that wait beside the present one: they take over, are replaced, and never stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waits import wait_until

from outrider.config import EngineConfig
from outrider.engine.launch import child
from outrider.engine.launch.child import EngineChild, StandbyEngines
from outrider.loadtest.servers.keeper import descendants

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-draft"
SECRET = "5e" * 32
_LIMIT_S = 300.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """For passing files; short, as the names of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        yield Path(made)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[StandbyEngines]:
    monkeypatch.setattr(child, "STANDBY_AFTER_S", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made = StandbyEngines(EngineConfig.from_kwargs(model=MODEL, kv_cache_gb=0.1), SECRET)
    yield made
    made.close()


def _is_running(pid: int) -> bool:
    """Not merely waiting for somebody to notice its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _waiting(line: StandbyEngines) -> EngineChild:
    line.prepare()
    wait_until(lambda: line._next is not None and line._next.is_warm, _LIMIT_S)
    assert line._next is not None
    return line._next


def test_an_engine_that_waited_takes_over_with_the_ranks_it_has(line: StandbyEngines) -> None:
    waiting = _waiting(line)
    wait_until(lambda: len(descendants(waiting.pid)) == 1, _LIMIT_S)
    ranks = descendants(waiting.pid)
    engine = line.take()
    assert engine is waiting
    told: list[str] = []
    try:
        engine.start(told.append)
        assert descendants(engine.pid) == ranks
        assert any(f"(pid {ranks[0]})" in each for each in told)
        assert any("weights loaded" in each for each in told)
    finally:
        engine.close()
    wait_until(lambda: not any(map(_is_running, ranks)), _LIMIT_S)


def test_one_that_ended_while_it_waited_is_not_taken(line: StandbyEngines) -> None:
    waiting = _waiting(line)
    os.kill(waiting.pid, signal.SIGKILL)
    wait_until(lambda: not waiting.is_warm, _LIMIT_S)
    assert line.take() is not waiting


def test_with_the_line_ends_whoever_waits(line: StandbyEngines, folder: Path) -> None:
    pid = _waiting(line).pid
    assert list(folder.iterdir())
    line.close()
    wait_until(lambda: not _is_running(pid), _LIMIT_S)
    assert not list(folder.iterdir())


def test_without_standby_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STANDBY_AFTER_S", 0.0)
    line = StandbyEngines(EngineConfig.from_kwargs(model=MODEL, standby=False), SECRET)
    line.prepare()
    assert line._timer is None and line._next is None


def test_a_server_that_is_killed_takes_whoever_waits_along(folder: Path) -> None:
    code = (
        "import sys, time; from outrider.config import EngineConfig;"
        "from outrider.engine.launch.child import EngineChild;"
        f"waiting = EngineChild(EngineConfig.from_kwargs(model={MODEL!r}), {SECRET!r});"
        "waiting.warm(); print(waiting.pid, flush=True); time.sleep(600)"
    )
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            pid = int(server.stdout.readline())
            wait_until(lambda: len(descendants(pid)) == 1, _LIMIT_S)
        finally:
            server.kill()
    wait_until(lambda: not _is_running(pid), _LIMIT_S)
    wait_until(lambda: not list(folder.iterdir()), _LIMIT_S)
