"""The parts of cluster/ that need no cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.checkpoints.environment import model_environment
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Bookmark, Event, EventKind, Journal
from outrider.cluster.ray.actors import Endpoint
from outrider.cluster.ray.postmortem import End, root_cause
from outrider.cluster.ray.sweeper import Sweeper
from outrider.cluster.tasks import first_of, in_own_thread
from outrider.restarts import LONGEST_PAUSE_S, Restarts

# -- pauses -----------------------------------------------------------------------------------


def test_pauses_double_up_to_the_longest() -> None:
    restarts = Restarts(lambda: 0.0)
    pauses = [restarts.lost() for _ in range(8)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_what_has_worked_a_while_is_started_again_at_once() -> None:
    now_s = 0.0
    restarts = Restarts(lambda: now_s)
    for _ in range(5):
        restarts.lost()
    restarts.runs()
    now_s += LONGEST_PAUSE_S - 1
    assert restarts.lost() == 8.0
    now_s += 2
    assert restarts.lost() == 0.0


def test_the_time_away_counts_from_the_loss_through_every_failed_start() -> None:
    now_s = 0.0
    restarts = Restarts(lambda: now_s)
    restarts.runs()
    now_s = 10.0
    restarts.lost()
    now_s = 13.0
    restarts.lost()
    now_s = 17.0
    assert restarts.runs() == 7.0
    now_s = 20.0
    restarts.lost()
    now_s = 21.0
    assert restarts.runs() == 1.0


def test_only_what_has_never_run_may_fail_for_good() -> None:
    restarts = Restarts(lambda: 0.0)
    restarts.lost()
    assert restarts.is_first
    restarts.runs()
    restarts.lost()
    assert not restarts.is_first


# -- the journal ------------------------------------------------------------------------------


def _line(text: str) -> Event:
    return Event(EventKind.STAGE, text)


def test_a_reader_gets_what_it_has_not_read_in_order() -> None:
    async def run() -> list[list[Event]]:
        journal = Journal()
        journal.say(_line("a"))
        journal.say(_line("b"))
        first = await journal.read(Bookmark(), 1.0)
        journal.say(_line("c"))
        second = await journal.read(first.bookmark, 1.0)
        return [first.events, second.events]

    assert asyncio.run(run()) == [[_line("a"), _line("b")], [_line("c")]]


def test_a_reader_waits_for_the_next_line_but_not_for_ever() -> None:
    async def run() -> tuple[list[Event], list[Event]]:
        journal = Journal()
        nothing = await journal.read(Bookmark(), 0.01)
        reading = asyncio.create_task(journal.read(nothing.bookmark, 10.0))
        await asyncio.sleep(0)
        journal.say(_line("late"))
        return nothing.events, (await reading).events

    assert asyncio.run(run()) == ([], [_line("late")])


def test_who_was_away_when_readers_were_woken_does_not_wait() -> None:
    async def run() -> tuple[float, float]:
        journal = Journal()
        journal.say(_line("a"))
        read = await journal.read(Bookmark(), 0.0)
        journal.wake()  # the state is another, and no line says so
        began_s = time.monotonic()
        again = await journal.read(read.bookmark, 60.0)
        heard_s = time.monotonic()
        await journal.read(again.bookmark, 0.05)
        return heard_s - began_s, time.monotonic() - heard_s

    told_after_s, waited_s = asyncio.run(run())
    assert told_after_s < 30.0
    assert waited_s >= 0.05, "it is told once"


def test_a_bookmark_of_another_journal_means_the_beginning() -> None:
    async def run() -> list[Event]:
        journal = Journal()
        journal.say(_line("a"))
        return (await journal.read(Bookmark("another", 7), 0.0)).events

    assert asyncio.run(run()) == [_line("a")]


# -- logs and ends ----------------------------------------------------------------------------


def test_who_vanished_is_to_blame_before_those_who_miss_it() -> None:
    told = End("target rank 0", 1.0, None, False)
    missed = End("target rank 1", 1.1, "connection closed by peer", False)
    vanished = End("target rank 2", 1.2, "killed", True)
    assert root_cause([told, missed, vanished]) is vanished
    assert root_cause([told, missed]) is missed
    assert root_cause([told]) is None


def test_whoever_is_not_first_is_cancelled_and_failures_are_raised() -> None:
    cancelled: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("wait")
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(first_of(wait(), fail()))
    assert cancelled == ["wait"]


# -- the sweeper -------------------------------------------------------------------------------

SERVER = """
import subprocess, sys, time
from pathlib import Path
from outrider.cluster.ray.sweeper import Sweeper
folder = Path(sys.argv[1])
sweeper = Sweeper(folder)
child = subprocess.Popen(["sleep", "60"], stdout=(folder / "log").open("w"), start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_processes_of_a_killed_server_are_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        assert not _has_ended(child)
        os.kill(server.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while not _has_ended(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_warden_spares_others_and_the_server_itself(tmp_path: Path) -> None:
    with (tmp_path / "own").open("w"), subprocess.Popen(["sleep", "60"]) as other:
        with Sweeper(tmp_path):
            pass
        assert not _has_ended(other.pid)
        other.kill()


def test_whoever_reads_a_log_or_has_it_in_an_editor_is_spared(tmp_path: Path) -> None:
    log = tmp_path / "raylet.out"
    log.write_text("a line\n")
    with (
        (tmp_path / ".raylet.out.swp").open("w") as hidden,
        subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.PIPE) as reader,
        subprocess.Popen(["sleep", "60"], stdout=hidden) as editor,
    ):
        assert reader.stdout is not None and reader.stdout.readline() == b"a line\n"
        with Sweeper(tmp_path), log.open("a") as end:
            writer = subprocess.Popen(["sleep", "60"], stdout=end)
        assert writer.wait(60) == -signal.SIGKILL
        assert not _has_ended(reader.pid) and not _has_ended(editor.pid)
        reader.kill()
        editor.kill()


# -- logs in a folder that others may write to ------------------------------------------------

REDIRECTED = """
import sys
from pathlib import Path
from outrider.cluster.ray import postmortem
postmortem.logs_folder = lambda: Path(sys.argv[1])
postmortem.redirect_output("target-0")
print("its words", flush=True)
"""


def _redirected(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", REDIRECTED, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_log_is_its_owners_to_read(tmp_path: Path) -> None:
    assert _redirected(tmp_path).returncode == 0
    log = tmp_path / "outrider-target-0.log"
    assert log.read_text() == "its words\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "outrider-target-0.log").symlink_to(precious)
    done = _redirected(tmp_path)
    assert done.returncode != 0
    assert "outrider-target-0.log cannot be written" in done.stderr
    assert precious.read_text() == "kept"


# -- where models come from --------------------------------------------------------------------

ACTOR = """
import sys
from pathlib import Path
from outrider.cluster.ray import actors
from outrider.cluster.ray import postmortem
assert not {"huggingface_hub", "transformers", "torch"} & sys.modules.keys()  # which read it
postmortem.logs_folder = lambda: Path(sys.argv[1])
actors.RankActor("target", 0, 1, {"HF_HOME": "/elsewhere", "HF_HUB_OFFLINE": "1"})
from huggingface_hub import constants
print(constants.HF_HOME, constants.HF_HUB_OFFLINE, flush=True)
"""


def test_a_rank_takes_models_from_where_its_controller_does(tmp_path: Path) -> None:
    """By what it is told, as Ray's processes inherit nothing of the server's environment."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", ACTOR, str(tmp_path)]
    subprocess.run(command, env=plain, check=True, timeout=60)
    assert (tmp_path / "outrider-target-0.log").read_text() == "/elsewhere True\n"


def test_only_what_decides_where_models_come_from_is_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of the hub")
    monkeypatch.setenv("OUTRIDER_SECRET", "of this server")
    handed = model_environment()
    assert handed["HF_TOKEN"] == "of the hub"
    assert "OUTRIDER_SECRET" not in handed


# -- where an engine listens ------------------------------------------------------------------


def test_an_engine_is_reached_over_its_socket_from_its_own_node_only() -> None:
    both = Endpoint("unix:/e", "tcp:10.0.0.1:7000", "here", "secret")
    assert both.address_from({"here"}) == "unix:/e"
    assert both.address_from({"here", "there"}) == "tcp:10.0.0.1:7000"
    alone = Endpoint("unix:/e", None, "here", "secret")
    assert alone.address_from({"here"}) == "unix:/e"
    with pytest.raises(ClusterError, match="restart the server to use the nodes"):
        alone.address_from({"there"})


# -- a cluster that is there already ----------------------------------------------------------

CONNECT = """
import sys
from outrider.cluster.ray.session import ray_session
from outrider.errors import ConfigError
try:
    with ray_session(sys.argv[1], 1):
        pass
except ConfigError as error:
    print(error)
"""


def test_who_has_no_token_is_told_which_variables_to_set(tmp_path: Path) -> None:
    """Ray looks for it before it says anything to the cluster."""
    environment = os.environ | {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-c", CONNECT, address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == (
        f"cluster.address is '{address}' but that Ray cluster refuses authentication: Token "
        "authentication is enabled but no authentication token was found; set RAY_AUTH_MODE as on "
        "its nodes, and if that is token RAY_AUTH_TOKEN too.\n"
    )


WAIT = """
import sys, threading
from outrider.cluster.ray import session
from outrider.errors import ConfigError
class Ray:
    def __init__(self): self.attempts = 0
    def init(self, **options):
        self.attempts += 1
        if self.attempts < 3:
            raise ConnectionError("Could not find any running Ray instance.")
        print("connected after", self.attempts)
        raise SystemExit(0)
    def shutdown(self): pass
session.ray, session._RETRY_S = Ray(), 0.01
session.bootstrap_address = str  # whatever other Ray this host has
given_up = threading.Event()
if sys.argv[2] == "given up":
    given_up.set()
try:
    with session.ray_session("auto", 1, float(sys.argv[1]), given_up):
        pass
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("timeout_s", "how", "expected"),
    [
        ("60", "", "connected after 3\n"),
        ("0", "", "no Ray cluster can be used there: Could not find any running Ray instance."),
        ("60", "given up", "no Ray cluster can be used there: "),
    ],
    ids=["waits", "fails at once", "is given up"],
)
def test_a_ray_that_does_not_answer_yet_is_waited_for(
    timeout_s: str, how: str, expected: str
) -> None:
    command = [sys.executable, "-c", WAIT, timeout_s, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert expected in done.stdout, done.stderr
    is_told = "no Ray answers at auto yet, waiting up to 60 s for it" in done.stderr
    assert is_told is (timeout_s == "60")


def test_work_for_which_there_is_no_thread_fails_as_any_want_of_the_system_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", refuse)
            work = in_own_thread(lambda: None, "work")
        with pytest.raises(BlockingIOError, match="can't start new thread"):
            await work

    asyncio.run(run())
