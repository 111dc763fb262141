"""llama.cpp as a peer: what it is asked and started with, and how its settings are found."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fake_llama
import pytest

from outrider.benchmarks.peers.llama_search import LEAST_GAIN, SettingsSearchResult, find_fastest
from outrider.benchmarks.peers.llama_servers import LlamaServer, LlamaSettings
from outrider.benchmarks.peers.process import PeerProcess
from outrider.benchmarks.peers.protocol import Mode, Options, PeerError, Tokens

DEFAULTS = LlamaSettings(threads=2)
OPTIONS = Options("target.gguf", "draft.gguf", "", threads=2, max_model_len=64)
DRAFT = Mode("draft", 2)
GONE_TIMEOUT_S = 60.0


class Program:
    """A `llama-server` that answers without a model."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "llama-server"
        source = Path(fake_llama.__file__).read_text(encoding="utf-8")
        self.path.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
        self.path.chmod(0o755)
        self._log = folder / "started.jsonl"
        self.env = {"FAKE_LLAMA_LOG": str(self._log)}

    def started(self) -> list[list[str]]:
        """The process id and the arguments of each start."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        return [[str(part) for part in json.loads(line)] for line in lines]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def peer(program: Program) -> Iterator[PeerProcess]:
    options = replace(OPTIONS, executable=str(program.path))
    with PeerProcess("llama.cpp", options, env=program.env) as process:
        yield process


def test_prompts_go_in_as_ids_and_texts_come_back_in_their_order(peer: PeerProcess) -> None:
    generation = peer.generate([[1, 2], [30], [400]], 3)

    assert generation.token_ids == [[3, 4, 5], [31, 32, 33], [401, 402, 403]]
    assert (generation.rounds, generation.drafted, generation.accepted) == (9, 0, 0)
    assert peer.generate([[7]], 1).token_ids == [[8]]


def test_a_draft_has_a_server_of_its_own_and_its_counts_are_told(
    peer: PeerProcess, program: Program
) -> None:
    generation = peer.generate([[1], [2]], 6, DRAFT)

    assert (generation.rounds, generation.drafted, generation.accepted) == (8, 6, 4)
    arguments = program.started()[-1]
    assert arguments[arguments.index("--spec-draft-model") + 1] == "draft.gguf"
    assert arguments[arguments.index("--spec-draft-n-max") + 1] == "2"


def test_the_program_keeps_nothing_between_requests_and_has_room_for_all_slots(
    peer: PeerProcess, program: Program
) -> None:
    arguments = program.started()[0]
    named = dict(zip(arguments, arguments[1:], strict=False))

    assert {"--no-cache-prompt", "--no-kv-unified"} <= set(arguments)
    assert named["--cache-ram"] == "0" and named["--threads"] == named["--threads-batch"] == "2"
    assert int(named["--ctx-size"]) == 64 * int(named["--parallel"])
    assert "--spec-type" not in named


def test_the_hello_tells_the_version_and_the_settings(peer: PeerProcess) -> None:
    assert peer.info.versions == {"llama-server": "version: fake built for tests"}
    assert peer.info.settings["flash_attn"] == "on"
    assert peer.info.settings["search"] == "none"


def test_a_prompt_that_was_found_in_a_cache_is_refused(program: Program) -> None:
    options = replace(OPTIONS, executable=str(program.path))
    with (
        PeerProcess("llama.cpp", options, env=program.env) as peer,
        pytest.raises(PeerError, match="computed 1 tokens of a prompt of 2"),
    ):
        peer.generate([[fake_llama.CACHED, 1]], 3)


def test_a_program_that_cannot_load_its_model_is_reported(program: Program) -> None:
    options = replace(OPTIONS, target="missing.gguf", executable=str(program.path))
    with pytest.raises(PeerError, match="failed to load model"):
        PeerProcess("llama.cpp", options, env=program.env)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_closed_peer_leaves_no_server_behind(program: Program) -> None:
    options = replace(OPTIONS, executable=str(program.path))
    with PeerProcess("llama.cpp", options, env=program.env):
        pid = program.started()[-1][0]
        assert Path(f"/proc/{pid}").exists()

    deadline = time.monotonic() + GONE_TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_package_serves_the_same_inside_the_process(tmp_path: Path) -> None:
    shutil.copy(fake_llama.__file__, tmp_path / "xllamacpp.py")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    with PeerProcess("llama.cpp", OPTIONS, env=env) as peer:
        plain, drafted = peer.generate([[1], [2]], 4), peer.generate([[1]], 4, DRAFT)

    assert peer.info.versions == {"xllamacpp": "1.2.3", "uses": "CPU : NEON = 1 |"}
    assert plain.token_ids == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert (plain.drafted, drafted.drafted, drafted.accepted) == (0, 3, 2)


class Bench:
    """Servers whose speed is known, on a clock that only they move."""

    def __init__(self, seconds: Callable[[LlamaSettings], float]) -> None:
        self._seconds, self._now_s, self.open = seconds, 0.0, 0

    def find(self) -> SettingsSearchResult:
        found = find_fastest(DEFAULTS, self._start, self._generate, lambda: self._now_s)
        assert self.open == 0
        return found

    def _start(self, settings: LlamaSettings) -> LlamaServer:
        self.open += 1
        return Known(settings, self)

    def _generate(self, server: LlamaServer, prompts: list[Tokens], max_tokens: int) -> None:
        assert isinstance(server, Known)
        self._now_s += self._seconds(server.settings)


class Known:
    address = ""

    def __init__(self, settings: LlamaSettings, bench: Bench) -> None:
        self.settings, self._bench = settings, bench

    def close(self) -> None:
        self._bench.open -= 1


def test_the_fastest_settings_are_found_one_choice_after_another() -> None:
    best = replace(DEFAULTS, flash_attn="off", kv_type="f32", ubatch=64, mmap=False)

    def seconds(settings: LlamaSettings) -> float:
        gains = (
            (settings.flash_attn, settings.kv_type) == ("off", "f32"),
            settings.ubatch == best.ubatch,
            not settings.mmap,
            settings.threads == best.threads,
            settings.batch == best.batch,
        )
        return 10.0 - sum(gains)

    found = Bench(seconds).find()

    assert found.settings == best
    assert found.gain == pytest.approx(8 / 5)
    assert found.describe() == f"fastest of {found.tried} tried, 1.60 times as fast as its defaults"


def test_defaults_stay_where_nothing_is_faster_by_more_than_chance() -> None:
    found = Bench(lambda settings: 1.0 if settings == DEFAULTS else 1.0 - LEAST_GAIN / 2).find()

    assert (found.settings, found.gain) == (DEFAULTS, 1.0)


def test_a_winner_that_loses_against_the_defaults_gives_way_to_them() -> None:
    calls: list[LlamaSettings] = []

    def seconds(settings: LlamaSettings) -> float:
        """The defaults are slow at first only, as on a machine that was busy then."""
        calls.append(settings)
        return 2.0 if settings == DEFAULTS and len(calls) < 10 else 1.0

    assert Bench(seconds).find().settings == DEFAULTS
