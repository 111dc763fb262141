"""`outrider bench` as a user runs it, against scripted servers that it starts itself."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waits import wait_until

from outrider.cli import app
from outrider.loadtest.records import RequestOutcome
from outrider.loadtest.runs import RunFolder

pytestmark = [pytest.mark.thorough]

PYTHON = shlex.quote(sys.executable)
FAKE = f"{PYTHON} -m outrider.loadtest.fake --http {{port}} --ttft 5ms --gap 1ms --updates 4"
LOAD = [
    "--rate",
    "20",
    "--warm-up",
    "0.1s",
    "--cool-down",
    "0s",
    "--timeout",
    "3s",
    "--limit",
    "8",
    "--max-tokens",
    "4",
]
LIMIT_S = 400.0


class Command:
    """Runs `outrider bench`; its processes are known by a mark in their environment."""

    def __init__(self) -> None:
        self._mark = f"_BENCH_TEST={secrets.token_hex(8)}"

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        name, _, value = self._mark.partition("=")
        # A shell's background job ignores Ctrl-C, and so would all that it starts.
        return subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-m", "outrider", "bench"]
            + [*map(str, arguments)],
            env=os.environ | {name: value, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str | Path) -> tuple[int, str]:
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    def pids(self) -> list[int]:
        return [int(e.name) for e in os.scandir("/proc") if e.name.isdigit() and self._is_own(e)]

    def _is_own(self, entry: os.DirEntry[str]) -> bool:
        try:
            return self._mark.encode() in Path(entry.path, "environ").read_bytes()
        except OSError:
            return False


@pytest.fixture
def bench() -> Iterator[Command]:
    command = Command()
    yield command
    left = command.pids()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def _sent(folder: Path) -> int:
    path = folder / "requests.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_two_servers_are_measured_in_turns_reported_and_compared(
    bench: Command, tmp_path: Path
) -> None:
    serve = ["serve", "--server", f"a={FAKE}", "--server", f"b={FAKE} --word x", *LOAD]
    serve += ["--duration", "1s", "--blocks", "3"]
    met = ["--fail-if-not", "errors==0", "--fail-if-not", "b/a:tokens_s>=0.1"]
    code, said = bench.run(*serve, *met, "--out", tmp_path / "one", "--api-key", "sesame")
    assert code == 0, said
    assert bench.pids() == []

    run = RunFolder(tmp_path / "one")
    assert [shift.arm for shift in run.shifts()] == ["a", "b", "b", "a", "a", "b"]
    records = list(run.requests())
    assert {record.outcome for record in records} == {RequestOutcome.OK}
    ids = {arm: Counter(r.id for r in records if r.arm == arm) for arm in "ab"}
    assert ids["a"] == ids["b"] and ids["a"].total() > 30
    assert {sample.server for sample in run.samples()} <= {"a", "b", "clients"}
    for name in ("run.json", "samples.jsonl", "report.html", "server-a.log", "server-b.log"):
        assert (run.folder / name).stat().st_size > 0
    assert "sesame" not in (run.folder / "run.json").read_text() + said
    assert "report.html" in said and "errors==0: met" in said

    two = str(tmp_path / "two")
    short = ["serve", "--server", f"a={FAKE}", *LOAD, "-d", "0.5s", "--out", two]
    code, said = bench.run(*short, "--fail-if-not", "ttft_p50<1ms")
    assert code == 3, said

    compared = CliRunner().invoke(
        app, ["bench", "compare", "--json", str(tmp_path / "one"), str(tmp_path / "two")]
    )
    assert compared.exit_code == 0 and json.loads(compared.stdout)
    (tmp_path / "two" / "report.html").unlink()
    again = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "two"), "--slo", "ttft=1s"])
    assert again.exit_code == 0 and (tmp_path / "two" / "report.html").exists()


def test_an_interrupted_run_ends_at_once_and_keeps_its_report(
    bench: Command, tmp_path: Path
) -> None:
    server = f"a={FAKE} --faults silence=0.1"
    with bench.start("serve", "--server", server, *LOAD, "-d", "8h", "--out", tmp_path) as process:
        wait_until(lambda: _sent(tmp_path) > 30)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert bench.pids() == []
    assert "Interrupted after" in said and "Traceback" not in said
    [shift] = RunFolder(tmp_path).shifts()
    assert 0.5 < shift.seconds < LIMIT_S and not shift.is_discarded
    assert (tmp_path / "report.html").stat().st_size > 0
    assert _sent(tmp_path) > 30


def test_an_interrupt_before_anything_was_measured_says_so(bench: Command, tmp_path: Path) -> None:
    slow = f"a={PYTHON} -c 'import time; time.sleep(600)' {{port}}"
    with bench.start("serve", "--server", slow, *LOAD, "--out", tmp_path) as process:
        wait_until((tmp_path / "server-a.log").exists)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "Interrupted before anything was measured" in said and "Traceback" not in said


def test_a_server_that_dies_at_once_is_told_with_the_end_of_its_log(
    bench: Command, tmp_path: Path
) -> None:
    hasty = f"a={PYTHON} -c 'raise SystemExit(\"no weights\")' {{port}}"
    code, said = bench.run("serve", "--server", hasty, *LOAD, "--out", tmp_path)
    assert code == 1, said
    assert "error: server a exited with code 1" in said and "error: no weights" in said
    assert "Traceback" not in said


def test_a_server_that_dies_on_the_way_costs_its_requests_and_is_started_again(
    bench: Command, tmp_path: Path
) -> None:
    arguments = ["serve", "--server", f"a={FAKE}", *LOAD, "-d", "2s", "-b", "2"]
    with bench.start(*arguments, "--out", tmp_path) as process:
        wait_until(lambda: _sent(tmp_path) > 5)
        [pid] = [pid for pid in bench.pids() if _is_server(pid)]
        os.kill(pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "Server a exited unexpectedly and was restarted." in said
    records = list(RunFolder(tmp_path).requests())
    outcomes = {block: Counter(r.outcome for r in records if r.block == block) for block in (0, 1)}
    assert outcomes[0][RequestOutcome.OK] and outcomes[0][RequestOutcome.ERROR]
    assert set(outcomes[1]) == {RequestOutcome.OK}


def _is_server(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"outrider.loadtest.fake" in words and b"-I" not in words
