"""The folder of an engine's socket, and those of engines that were killed."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from outrider.cluster.ray.engine_folder import make_engine_folder


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def bind_in(folder: Path, sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a relative name: the whole may be too long for a socket's."""
    with monkeypatch.context() as within:
        within.chdir(folder)
        sock.bind("e.sock")


def test_it_is_the_process_s_own_and_nobody_else_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine_folder(tmp_path)
    assert folder == tmp_path / f"e-{os.getpid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        bind_in(folder, listener, monkeypatch)
        listener.listen()
        assert make_engine_folder(tmp_path) != folder  # as if in another container
        assert folder.exists()


def test_a_listener_that_takes_nobody_in_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"e-{ended_pid()}"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        bind_in(folder, listener, monkeypatch)
        listener.listen(0)
        with monkeypatch.context() as within:
            within.chdir(folder)
            waiting.connect("e.sock")
        making = threading.Thread(target=make_engine_folder, args=(tmp_path,), daemon=True)
        making.start()
        making.join(60)
        assert not making.is_alive() and folder.exists()


def test_what_killed_engines_have_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, unused = (tmp_path / f"e-{ended_pid()}" for _ in range(2))
    starting, other = tmp_path / f"e-{os.getppid()}", tmp_path / "logs"
    for folder in (stale, unused, starting, other):
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as killed:
        bind_in(stale, killed, monkeypatch)
    make_engine_folder(tmp_path)
    assert not stale.exists() and not unused.exists()
    assert starting.exists() and other.exists()
