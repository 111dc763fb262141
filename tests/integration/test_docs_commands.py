"""The shell blocks of the first page a newcomer reads, run as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_tools import ROOT, Block, blocks

pytestmark = [pytest.mark.model, pytest.mark.alone]

PAGE = ROOT / "docs" / "getting-started.md"
PORTS = (8000, 50051)
LIMIT_S = 500.0
LONG = "<!-- long -->"
# A machine of its own: no process outlives it, and the ports of the page are free.
_NAMESPACES = ("unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child")
_LOOPBACK = "ip link set lo up && "


def runnable(is_long: bool) -> list[Block]:
    """The blocks of the page; those that take long only where there is time."""
    lines = PAGE.read_text().splitlines()
    found = [block for block in blocks(PAGE.read_text()) if block.language == "sh"]
    return [each for each in found if is_long or lines[each.line - 2] != LONG]


def script_of(wanted: list[Block]) -> str:
    """One shell for all of them, which ends at the first that fails and has said which."""
    parts = ["set -euo pipefail"]
    for block in wanted:
        if block.reason is None:
            parts += [f"echo '== line {block.line}' >&2", block.text]
    return "\n".join(parts) + "\n"


def make_clone(folder: Path) -> None:
    """A clone whose environment is this one, set up already."""
    for entry in ROOT.iterdir():
        if entry.name not in (".venv", ".git") and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    environment = folder / ".venv"
    environment.mkdir()
    for name in ("bin", "lib", "include", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (environment / name).symlink_to(Path(sys.prefix) / name)
    for stamp in (".installed-core", ".installed"):
        shutil.copy(ROOT / "pyproject.toml", environment / stamp)


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | variables
    command = ["bash", "-c", script]
    if has_namespaces():
        command = [*_NAMESPACES, "bash", "-c", _LOOPBACK + script]
    elif taken := [port for port in PORTS if is_taken(port)]:
        pytest.skip(f"ports {taken} are taken, and only root has others of the same number")
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output)


def has_namespaces() -> bool:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")):
        return False
    done = subprocess.run([*_NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True)
    return done.returncode == 0


def is_taken(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def walk(folder: Path, is_long: bool, **variables: str) -> str:
    make_clone(folder)
    done = run(script_of(runnable(is_long)), folder, **variables)
    log = folder / "serve.log"
    server = log.read_text() if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n== serve.log\n{server}"
    return done.stdout


def test_every_block_works_as_it_stands(tmp_path: Path) -> None:
    said = walk(tmp_path, is_long=False, SERVE="--no-ray")
    assert " Paris" in said  # curl
    assert "CompletionUsage(" in said  # OpenAI's client
    assert "same text by every method: True" in said  # gRPC
    assert re.search(r"^outrider:draft_up\{[^}]*\} 1\.0$", said, re.MULTILINE)
    assert re.search(r"^policy +fixed: at every step", said, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.ray
def test_the_whole_walk_with_ray_and_another_draft_under_load(tmp_path: Path) -> None:
    said = walk(tmp_path, is_long=True)
    assert (tmp_path / "report" / "report.html").is_file()
    assert str(tmp_path / "my-draft") in said
    log = (tmp_path / "serve.log").read_text()
    assert "replica 0 has the new draft" in log and "replica 1" not in log
    assert re.search(r"^clients 2 +ours +\d+ / 0 ", said, re.MULTILINE)


def test_a_block_that_fails_is_named(tmp_path: Path) -> None:
    done = run(script_of([Block("sh", "true", 3, None), Block("sh", "false", 7, None)]), tmp_path)
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == "== line 7"


def test_a_block_with_a_reason_is_left_out() -> None:
    text = "<!-- not run: needs a cloud -->\n```sh\nfalse\n```\n\n```sh\ntrue\n```\n"
    assert "false" not in script_of(list(blocks(text)))


def test_the_long_walk_leaves_no_block_of_the_page_out() -> None:
    every = [block for block in blocks(PAGE.read_text()) if block.language == "sh"]
    assert runnable(is_long=True) == every
    assert [block for block in every if block.reason is not None] == []
    assert len(runnable(is_long=False)) == len(every) - PAGE.read_text().count(LONG)
