"""Tokens a round and speed of small random models, and texts that are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from checkpoints import random_model
from head_checkpoints import save_head

from outrider.benchmarks.proposers.__main__ import _measure_small
from outrider.benchmarks.proposers.contenders import (
    Contender,
    ProposerKind,
    ProposerVariant,
    check_sources,
    variants,
)
from outrider.benchmarks.proposers.prompts import BenchPrompt
from outrider.benchmarks.proposers.results_file import ResultsFile
from outrider.benchmarks.proposers.small import (
    ProposerBenchSettings,
    SmallRun,
    Timed,
    num_same,
    timed_tables,
)
from outrider.catalog.heads import HeadKind
from outrider.engine.llm import LLM
from outrider.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
ASKS = [
    BenchPrompt("qa", (3, 4, 5)),
    BenchPrompt("mbpp", (6, 7, 3, 9)),
    BenchPrompt("qa", tuple(3 + i % 9 for i in range(300))),
]
PLAIN, NGRAM = Contender("plain", ProposerKind.OFF), Contender("n-gram", ProposerKind.NGRAM)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(tmp_path_factory.mktemp("target"), seed=3)


def _saved(folder: Path, seed: int) -> Path:
    random_model("llama", seed, **SIZES).save_pretrained(folder)
    return folder


def settings_for(target: Path, **changes: Any) -> ProposerBenchSettings:
    given: dict[str, Any] = {
        "target": str(target),
        "device": "cpu",
        "tokens": 12,
        "context": 512,
        "batch": 2,
        "temperature": 0.8,
        "ignore_eos": True,
        "deterministic": True,
    }
    return ProposerBenchSettings(**given | changes)


@pytest.mark.model
def test_all_proposers_are_measured_and_write_the_plain_texts(target: Path, tmp_path: Path) -> None:
    reference = random_model("llama", 3, **SIZES)
    found = [
        *(PLAIN, NGRAM),
        Contender("draft", ProposerKind.DRAFT, str(_saved(tmp_path / "draft", seed=4))),
        *(
            Contender(
                kind, ProposerKind.HEAD, str(save_head(kind, tmp_path / kind, reference, seed=5))
            )
            for kind in HeadKind  # some of which guess fewer tokens than are asked for
        ),
    ]
    check_sources(str(target), found)
    out = tmp_path / "found.json"
    _measure_small(
        settings_for(target),
        variants(found, [5]),
        ASKS,
        ASKS[1:],
        ["rounds", "speed"],
        ResultsFile(out, {"device": "a test"}),
    )
    figures = json.loads(out.read_text())
    rounds, speed = figures["rounds"]["records"], figures["speed"]["records"]
    names = ["plain", "n-gram", "draft", *HeadKind]
    assert [each["proposer"] for each in rounds] == [each["proposer"] for each in speed] == names
    for how in ("greedy", "sampled"):
        for record in rounds:
            found_here = record[how]
            assert (found_here["same_texts"], found_here["texts"]) == (3, 3)
            assert found_here["all"]["tokens"] == 36
            assert {name: own["prompts"] for name, own in found_here["by_category"].items()} == {
                "mbpp": 1,
                "qa": 2,
            }
            assert found_here["by_prompt_length"].keys() == {"up to 256", "up to 1200"}
        assert rounds[0][how]["all"]["tokens_a_round"] == 1
        assert 0 < speed[2][how]["all"]["draft_share"] < 1
        assert all(each[how]["same_texts"] == each[how]["texts"] == 2 for each in speed)
    assert figures["speed"]["about"]["device"] == "a test"
    assert figures["speed"]["about"]["prompts"] == 2


@pytest.mark.model
def test_texts_that_differ_are_an_error_on_a_cpu(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = _saved(tmp_path / "other", seed=9)
    real = SmallRun._engine

    def engine_of_another_target(self: SmallRun, variant: ProposerVariant) -> LLM:
        if variant.contender is not NGRAM:
            return real(self, variant)
        return real(SmallRun(settings_for(other), [], ResultsFile(None, {})), variant)

    monkeypatch.setattr(SmallRun, "_engine", engine_of_another_target)
    with pytest.raises(typer.Exit) as ended:
        _measure_small(
            settings_for(target, temperature=None),
            variants([PLAIN, NGRAM], [3]),
            ASKS,
            [],
            ["rounds"],
            ResultsFile(tmp_path / "found.json", {}),
        )
    assert ended.value.exit_code == 1
    assert "3 of 3 texts of n-gram at depth 3 differ from plain" in capsys.readouterr().err
    [_, record] = json.loads((tmp_path / "found.json").read_text())["rounds"]["records"]
    assert (record["greedy"]["same_texts"], record["greedy"]["texts"]) == (0, 3)


def test_a_proposer_that_cannot_be_had_is_named_before_anything_is_measured(
    target: Path, tmp_path: Path
) -> None:
    wider = random_model("llama", 3, **(SIZES | {"hidden_size": 64}))
    head = save_head("medusa", tmp_path / "head", wider, seed=5)
    with pytest.raises(ModelError, match="hidden size of 64, and the target's is 32"):
        check_sources(str(target), [PLAIN, Contender("head", ProposerKind.HEAD, str(head))])


def test_texts_count_as_the_same_token_by_token() -> None:
    assert num_same([[1, 2], [3], [4, 5]], [[1, 2], [4], [4]]) == 1


def test_times_are_added_by_group_and_length_before_rates_are_taken() -> None:
    fast = Timed(tokens=10, whole_s=1.0, decoded=9, decoding_s=0.5, rounds=3, draft_s=0.1)
    slow = Timed(
        tokens=10, whole_s=3.0, decoded=9, decoding_s=2.5, rounds=9, draft_s=0.3, verify_s=1.2
    )
    found = timed_tables(ASKS, [fast, fast, slow])

    assert found["by_category"]["qa"]["decoding_tokens_per_s"] == 6
    assert found["by_category"]["qa"]["whole_tokens_per_s"] == 5
    assert found["by_category"]["qa"]["tokens_a_round"] == 1.5
    assert found["by_prompt_length"]["up to 256"]["decoding_tokens_per_s"] == 18
    assert found["by_prompt_length"]["up to 1200"]["draft_share"] == 0.2
    assert found["all"]["verify_ms"] == 80


def test_parts_of_earlier_runs_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    first = ResultsFile(path, {"commit": "a"})
    first.begin_part("rounds")
    first.add_record("rounds", {"proposer": "old"})
    first.begin_part("speed")
    first.add_record("speed", {"proposer": "kept"})
    second = ResultsFile(path, {"commit": "b"})
    second.begin_part("rounds", prompts=3)
    second.add_record("rounds", {"proposer": "new"})

    assert json.loads(path.read_text()) == {
        "rounds": {"about": {"commit": "b", "prompts": 3}, "records": [{"proposer": "new"}]},
        "speed": {"about": {"commit": "a"}, "records": [{"proposer": "kept"}]},
    }
