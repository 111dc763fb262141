"""Commands of a deployment: heard line by line, limited in time, and told apart from noise."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from outrider.cluster.deploy.cluster_file import ClusterFile
from outrider.cluster.deploy.remote import RayCommands, Shells, run
from outrider.cluster.errors import ClusterError


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def local_cluster(folder: Path) -> ClusterFile:
    settings = {
        "cluster_name": "mine",
        "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]},
        "auth": {"ssh_user": "me", "ssh_private_key": "~/key", "ssh_proxy_command": "nc %h %p"},
    }
    return ClusterFile(folder / "cluster.yaml", settings)


class Answering(Shells):
    """Whose head says what it is told to, among what a shell says."""

    def __init__(self, folder: Path, *lines: str) -> None:
        file = local_cluster(folder)
        super().__init__(file, RayCommands(file, folder / "log", folder))
        self._lines = lines

    def _ssh(self, ip: str, command: str) -> list[str]:
        assert (ip, command) == ("10.0.0.1", "outrider deploy on-head status")
        return python(f"print(*{self._lines!r}, sep='\\n')")


def test_lines_are_heard_and_the_last_are_kept() -> None:
    heard: list[str] = []
    done = run(python("for i in range(9): print(i)\nraise SystemExit(3)"), 20, heard.append)
    assert heard == [str(number) for number in range(9)]
    assert (done.code, done.last_words) == (3, "6 / 7 / 8")


def test_a_command_that_takes_too_long_is_ended_and_says_how_far_it_was() -> None:
    program = "import time; print('step 1', flush=True); time.sleep(60)"
    began_s = time.monotonic()
    with pytest.raises(ClusterError, match="did not end within 2 s; last output: step 1"):
        run(python(program), 2, lambda line: None)
    assert time.monotonic() - began_s < 30


def test_a_command_has_ended_though_others_hold_on_to_what_it_wrote_to() -> None:
    """As connections of SSH do that are kept for the next command."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    holder = int(run(python(program), 30, lambda line: None).last_words)
    os.kill(holder, signal.SIGKILL)  # raises if it has been waited for


def test_what_a_head_answers_is_found_among_what_shells_say(tmp_path: Path) -> None:
    said: list[str] = []
    lines = ("Welcome!", "outrider| weights loaded", 'outrider= {"server": null}', "logout")
    assert Answering(tmp_path, *lines).on_head("status", 20, said.append) == {"server": None}
    assert said == ["weights loaded"]


def test_what_a_head_says_went_wrong_is_raised_here(tmp_path: Path) -> None:
    shells = Answering(tmp_path, "outrider! the server has ended; no such model")
    with pytest.raises(ClusterError, match="^the server has ended; no such model$"):
        shells.on_head("status", 20, lambda text: None)


def test_a_head_without_outrider_is_told_by_what_it_said(tmp_path: Path) -> None:
    shells = Answering(tmp_path, "bash: outrider: command not found")
    with pytest.raises(ClusterError, match=r"head of mine gave no result; .* Last output: bas"):
        shells.on_head("status", 20, lambda text: None)


def test_hosts_are_reached_as_the_file_says(tmp_path: Path) -> None:
    file = local_cluster(tmp_path)
    words = Shells(file, RayCommands(file, tmp_path / "log", tmp_path))._ssh("10.0.0.2", "it's")
    assert "ProxyCommand=nc %h %p" in words
    assert words[words.index("-i") + 1] == str(Path("~/key").expanduser())
    assert words[-2:] == ["me@10.0.0.2", """bash --login -i -c 'it'"'"'s'"""]


def test_the_autoscaler_that_starts_all_hosts_of_our_own_is_chosen(tmp_path: Path) -> None:
    file = local_cluster(tmp_path)
    environment = RayCommands(file, tmp_path / "log", tmp_path).environment()
    assert environment["RAY_UP_enable_autoscaler_v2"] == "0"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["RAY_TMPDIR"] != environment["TMPDIR"] == str(tmp_path)
