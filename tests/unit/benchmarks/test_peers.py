"""Engines in their own processes, and how they are asked in turn."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.benchmarks.peers.comparison import TimedCall
from outrider.benchmarks.peers.measure import Case, PeerVariant, run_interleaved
from outrider.benchmarks.peers.process import PeerProcess
from outrider.benchmarks.peers.protocol import Mode, Options, PeerError
from outrider.loadtest.servers import cpu_clock

ENGINE = '''
import os, subprocess, sys, time
from outrider.benchmarks.peers.protocol import Generation

WORK = """
import sys, time
while time.process_time() < 0.5:
    pass
print(flush=True)
sys.stdin.read()
"""
BUSY = "import os; above = os.getppid()\\nwhile os.getppid() == above: pass"

class Echo:
    """Repeats a prompt's last token; token 13 kills it, token 7 makes it stop short, token 5
    has a process below it work, token 6 has one that works until it is told the next time."""
    below = None
    settings = {"pace": "slow"}
    def __init__(self, options):
        print("noise on standard output")
        if options.target == "missing":
            raise FileNotFoundError("no such checkpoint")
        self.versions = {"echo": "1", "threads": os.environ["OMP_NUM_THREADS"]}
    def generate(self, prompts, max_tokens, mode):
        print("more noise")
        if prompts[0][-1] == 13:
            sys.exit("out of luck")
        if prompts[0][-1] == 5:
            below = subprocess.Popen(
                [sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            below.stdout.readline()
        if prompts[0][-1] == 6 and self.below is None:
            self.below = subprocess.Popen([sys.executable, "-c", BUSY])
        elif prompts[0][-1] == 6:
            self.below.kill()
            self.below.wait()
        length = 1 if prompts[0][-1] == 7 else max_tokens
        return Generation([[p[-1]] * length for p in prompts], 0.5, drafted=mode.depth or 0)
'''


def options(target: str = "some") -> Options:
    return Options(target, "draft", "tokenizer", threads=3, max_model_len=64)


@pytest.fixture(scope="module")
def engine_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("engines")
    (folder / "echo_engine.py").write_text(ENGINE)
    paths = [str(folder), os.environ["PYTHONPATH"]]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def peer(engine_env: dict[str, str]) -> Iterator[PeerProcess]:
    with PeerProcess("echo_engine:Echo", options(), env=engine_env) as process:
        yield process


def test_a_peer_answers_with_the_texts_of_all_prompts_in_order(peer: PeerProcess) -> None:
    generation = peer.generate([[1, 2], [3]], 3, Mode("draft", 5))

    assert generation.token_ids == [[2, 2, 2], [3, 3, 3]]
    assert (generation.seconds, generation.drafted) == (0.5, 5)


def test_a_peer_learns_its_threads_before_it_imports_anything(peer: PeerProcess) -> None:
    assert peer.info.versions == {"echo": "1", "threads": "3"}


def test_a_peer_tells_what_was_chosen_for_it(peer: PeerProcess) -> None:
    assert peer.info.settings == {"pace": "slow"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_processes_below_a_peer_use_counts_as_its_own(peer: PeerProcess) -> None:
    before = peer.cpu_s()
    peer.generate([[5]], 3)
    after = peer.cpu_s()

    assert before is not None and after is not None
    assert after - before > 0.4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_peer_at_rest_and_what_is_below_it_uses_nothing_and_then_goes_on(
    peer: PeerProcess,
) -> None:
    peer.generate([[6]], 3)
    begun = cpu_s(peer)
    while cpu_s(peer) < begun + 0.1:  # what is below it works
        pass

    with peer.at_rest():
        time.sleep(0.05)  # a clock tick, and what was under way
        before = cpu_s(peer)
        time.sleep(0.3)
        used_s = cpu_s(peer) - before

    assert used_s < 0.05
    assert peer.generate([[6]], 3).token_ids == [[6, 6, 6]]


def cpu_s(peer: PeerProcess) -> float:
    used_s = peer.cpu_s()
    assert used_s is not None
    return used_s


def test_a_peer_that_dies_is_reported_with_its_last_words(peer: PeerProcess) -> None:
    with pytest.raises(PeerError, match=r"ended with code 1:\n(.*\n)*out of luck"):
        peer.generate([[13]], 3)


def test_a_peer_that_cannot_start_is_reported_with_its_error(engine_env: dict[str, str]) -> None:
    with pytest.raises(PeerError, match="no such checkpoint"):
        PeerProcess("echo_engine:Echo", options("missing"), env=engine_env)


def test_a_text_of_the_wrong_length_is_refused(peer: PeerProcess) -> None:
    with pytest.raises(PeerError, match=r"returned \[1\] tokens instead of 3"):
        peer.generate([[7]], 3)


def test_every_case_is_given_to_all_variants_and_the_first_one_changes(peer: PeerProcess) -> None:
    variants = [PeerVariant("a", "echo", Mode()), PeerVariant("b", "echo", Mode("draft", 2))]
    cases = [Case("x", "qa", ([1],)), Case("y", "rag", ([2],))]
    seen: list[TimedCall] = []

    samples = run_interleaved(
        {"echo": peer}, variants, cases, max_tokens=2, repeats=2, on_call=seen.append
    )

    assert [(s.case, s.variant) for s in samples] == [
        *[("x", "a"), ("x", "b"), ("y", "b"), ("y", "a")],
        *[("x", "a"), ("x", "b"), ("y", "b"), ("y", "a")],
    ]
    assert seen == samples
    assert [s.generation.drafted for s in samples[:2]] == [0, 2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_work_shows_on_the_clocks_of_the_process_and_of_the_machine() -> None:
    def clocks() -> tuple[float, float]:
        own, machine = cpu_clock.process_cpu_s(os.getpid()), cpu_clock.machine_cpu_s()
        assert own is not None and machine is not None
        return own, machine

    own, machine = clocks()
    while clocks()[0] < own + 0.1:
        pass

    assert clocks()[1] >= machine + 0.05


def test_a_process_that_is_gone_has_no_clock() -> None:
    assert cpu_clock.process_cpu_s(2**30) is None
