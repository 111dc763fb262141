"""The enlarged part of the comparison, at toy size on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_model
from head_checkpoints import save_head

from outrider.benchmarks.gpu_engine import EnlargedModels
from outrider.benchmarks.inflate_heads import HeadShape
from outrider.benchmarks.inflate_recipes import SHAPES, Shape, fitted, inflate_spec
from outrider.benchmarks.proposers.contenders import Contender, ProposerKind, variants
from outrider.benchmarks.proposers.enlarged import LONG, SHORT, EnlargedRun, by_length
from outrider.benchmarks.proposers.prompts import BenchPrompt
from outrider.benchmarks.proposers.results_file import ResultsFile
from outrider.workers.weights.checkpoint import load_spec

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SHAPE = Shape(48, 4, 8, 2, 32, 64)
ASKS = [
    BenchPrompt("qa", (3, 4, 5)),
    BenchPrompt("rag", tuple(3 + i % 9 for i in range(300))),
    BenchPrompt("rag", (3,) * 1300),
    BenchPrompt("mbpp", (6, 7, 3, 9)),
]


def test_short_and_long_prompts_are_apart_and_longer_ones_left_out() -> None:
    assert by_length(ASKS) == {SHORT: [ASKS[0], ASKS[3]], LONG: [ASKS[1]]}
    assert by_length(ASKS[:1]) == {SHORT: [ASKS[0]]}


@pytest.mark.model
def test_every_proposer_is_measured_though_one_cannot_be(tmp_path: Path) -> None:
    reference = random_model("llama", 3, **SIZES)
    reference.save_pretrained(tmp_path / "target")
    random_model("llama", 4, **SIZES).save_pretrained(tmp_path / "draft")
    head = save_head("eagle3", tmp_path / "eagle", reference, seed=5)
    found = [
        Contender("plain", ProposerKind.OFF),
        Contender("n-gram", ProposerKind.NGRAM),
        Contender("missing", ProposerKind.HEAD, str(tmp_path / "nowhere")),
        Contender("draft", ProposerKind.DRAFT, str(tmp_path / "draft")),
        Contender("eagle", ProposerKind.HEAD, str(head)),
    ]
    models = EnlargedModels(
        str(tmp_path / "target"), SHAPE, device="cpu", head_shape=HeadShape(SHAPE, 40, 64)
    )
    out = tmp_path / "found.json"
    run = EnlargedRun(
        models, ResultsFile(out, {}), draft_shape=None, tokens=10, temperatures={"greedy": 0.0}
    )
    run.measure(variants(found, [3]), {SHORT: [ASKS[0], ASKS[3]], LONG: [ASKS[1]]})

    assert len(run.failed) == 1 and "missing at depth 3 was not measured" in run.failed[0]
    figures = json.loads(out.read_text())
    for part, count in ((SHORT, 2), (LONG, 1)):
        records = figures[part]["records"]
        assert [each["proposer"] for each in records] == ["plain", "n-gram", "draft", "eagle"]
        for record in records:
            own = record["greedy"]
            assert (own["same_texts"], own["texts"]) == (count, count)
            assert own["tokens"] == 9 * count and own["tokens_a_round"] >= 0.9
        assert records[0]["greedy"]["acceptance"] == 0


def test_a_draft_larger_than_the_shape_in_something_keeps_that(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 40, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 5, "num_key_value_heads": 5}
    random_model("llama", 4, **sizes).save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    shape = fitted(SHAPES["110m"], spec)

    assert shape == Shape(768, 6, 15, 5, 64, 3072)
    assert inflate_spec(spec, shape).num_layers == 6
    assert fitted(SHAPES["110m"], load_spec("smollm2-135m-draft")) == SHAPES["110m"]
