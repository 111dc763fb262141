"""`outrider deploy` at the command line: files to begin with, and what is wrong with others."""

from __future__ import annotations

import itertools
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cli import deploy, main
from outrider.gateway.auth.keys_file import key_digest, read_keys


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["deploy", *words])
    return int(caught.value.code or 0)


@pytest.mark.parametrize("kind", ("on-premise", "aws", "gcp"))
def test_init_writes_all_that_the_file_names(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "outrider-1-py3-none-any.whl"
    wheel.touch()
    folder = tmp_path / "mine"
    assert run("init", kind, str(folder), "--wheel", str(wheel)) == 0
    settings = yaml.safe_load((folder / "cluster.yaml").read_text())
    assert all((folder / source).exists() for source in settings["file_mounts"].values())
    assert (folder / "dist" / wheel.name).exists()
    assert f"outrider deploy up -f {folder / 'cluster.yaml'}" in capsys.readouterr().out


def test_init_makes_a_key_and_a_token_that_only_their_owner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init", "on-premise", str(tmp_path)) == 0
    key = capsys.readouterr().err.split()[-1]
    (entry,) = read_keys(tmp_path / "conf" / "keys.yaml")
    assert entry.digest == key_digest(key)
    token = tmp_path / "ray-token"
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_init_leaves_a_file_that_is_there_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text("mine\n")
    assert run("init", "aws", str(tmp_path)) == 2
    assert "cluster.yaml exists; choose another folder." in capsys.readouterr().err
    assert (tmp_path / "cluster.yaml").read_text() == "mine\n"


@pytest.mark.parametrize("command", ("up", "down", "status"))
def test_a_file_that_was_not_edited_is_refused_in_a_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init", "on-premise", str(tmp_path)) == 0
    capsys.readouterr()
    assert run(command, "-f", str(tmp_path / "cluster.yaml")) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].endswith("provider.head_ip is 'EDIT-HEAD-IP'; put your own in its place.")


@pytest.mark.parametrize(
    ("server", "keeper", "expected"),
    [
        (None, None, "not running, outrider 1"),
        (None, 5, "not running, restarting, outrider 1"),
        ({"pid": 7, "state": "serving", "restarts": 0}, 5, "serving (pid 7), outrider 1"),
        (
            {"pid": 7, "state": "serving", "restarts": 2},
            None,
            "serving (pid 7, 2 restarts, no keeper), outrider 1",
        ),
    ],
)
def test_status_says_who_keeps_the_server(
    server: dict[str, Any] | None, keeper: int | None, expected: str
) -> None:
    found: dict[str, Any] = {
        "version": "1",
        "server": server,
        "keeper": keeper,
        "nodes": [],
        "processes": [],
    }
    assert deploy._status_lines(found) == [f"server  {expected}"]


def test_a_supervisor_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init", "on-premise", str(tmp_path)) == 0
    file = tmp_path / "cluster.yaml"
    numbers = itertools.count(1)  # no two hosts are the same
    text = re.sub(r"EDIT-[A-Z0-9-]+", lambda _: f"10.0.0.{next(numbers)}", file.read_text())
    file.write_text(text + "metadata: {supervisor: runit}\n")
    assert run("up", "-f", str(file)) == 2
    said = capsys.readouterr().err
    assert "metadata.supervisor is 'runit'; it must be keeper or systemd." in said
