"""Enlarged heads propose with an enlarged target what small ones propose with the small one."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import random_model
from head_checkpoints import save_head
from head_tools import Drafted, HeadRun, assert_same, load, write
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from outrider.benchmarks.gpu_engine import BenchEngine, EnlargedModels, Proposing
from outrider.benchmarks.inflate_heads import (
    HeadShape,
    InflatedHead,
    inflate_head,
    load_inflated_head,
)
from outrider.benchmarks.inflate_recipes import Shape
from outrider.catalog.heads import HeadKind
from outrider.checkpoints.files import read_json
from outrider.errors import ModelError
from outrider.kernels.ops import select_ops
from outrider.workers.heads.base import Head
from outrider.workers.heads.configs import Eagle3Config, HeadConfig
from outrider.workers.heads.formats import head_config
from outrider.workers.heads.weights import open_weights
from outrider.workers.models.names import LLAMA
from outrider.workers.weights.checkpoint import load_spec

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32, backend="torch")
VOCAB_SIZE = 12  # so few that a head without sense is right now and then
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TARGET = Shape(72, 5, 12, 3, 32, 80)
SHAPE = HeadShape(TARGET, draft_vocab_size=40, inner_dim=70)
WIDE = {"hidden_size": 48, "max_position_embeddings": 64}
PROMPTS = [[3, 5, 7, 4], [9, 8, 3, 3, 6, 10, 4, 11, 5], [4] * 17]
NUM_TOKENS = 24
DEPTH = 3


@dataclasses.dataclass(frozen=True)
class Decoded:
    texts: list[list[int]]
    rounds: int
    drafted: int
    accepted: int


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target")
    reference = random_model("llama", 3, **SIZES)
    reference.save_pretrained(folder)
    return folder, reference


def decoded(target: Path, head: Path, shape: HeadShape | None = None) -> Decoded:
    """With models as they are, or enlarged."""
    own_shape = None if shape is None else shape.target
    models = EnlargedModels(str(target), own_shape, device="cpu", head_shape=shape)
    own = models.head(str(head))
    proposing = Proposing(own.spec.kind, None, own)
    engine = BenchEngine(models, depth=DEPTH, max_len=128, budget=16, proposing=proposing)
    found, texts = engine.decode(PROMPTS, NUM_TOKENS)
    stats = engine.loop.scheduler.stats
    return Decoded(texts, found.rounds, stats.drafted_tokens, stats.accepted_tokens)


def enlarged(head: Path, target: Path) -> Head:
    return load_inflated_head(
        head, target, SHAPE, dtype=torch.float32, device=CPU, ops=OPS, max_position=64
    )


@pytest.mark.model
@pytest.mark.parametrize("kind", HeadKind)
def test_an_enlarged_head_drafts_in_an_engine_what_the_small_one_drafts(
    kind: HeadKind, target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    head = save_head(kind, tmp_path / "head", reference, seed=5)
    small = decoded(folder, head)
    assert decoded(folder, head, SHAPE) == small
    assert 0 < small.accepted < small.drafted


# -- the function ---------------------------------------------------------------------------------


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3


def norm(size: int) -> Tensor:
    return 1 + random(size)


HIDDEN = SIZES["hidden_size"]
LAYER = "midlayer"
EAGLE3_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "as it is": ({}, {}),
    "features normed together": (
        {"norm_before_fc": True},
        {"input_norm.weight": norm(3 * HIDDEN)},
    ),
    "features normed each": ({}, {f"fc_norm.{i}.weight": norm(HIDDEN) for i in range(3)}),
    "a residual that is normed": ({"norm_before_residual": True}, {}),
    "states that are normed": ({"norm_output": True}, {}),
    "an embedding of its own": ({}, {"embed_tokens.weight": random(VOCAB_SIZE, HIDDEN)}),
    "a large epsilon": ({"rms_norm_eps": 0.1}, {}),
    "two layers": (
        {"num_hidden_layers": 2},
        {
            **{f"layers.1.{name}.weight": norm(HIDDEN) for name in LLAMA.norms},
            "layers.1.self_attn.q_proj.weight": random(64, HIDDEN),
            "layers.1.self_attn.k_proj.weight": random(32, HIDDEN),
            "layers.1.self_attn.v_proj.weight": random(32, HIDDEN),
            "layers.1.self_attn.o_proj.weight": random(HIDDEN, 64),
            "layers.1.mlp.gate_proj.weight": random(48, HIDDEN),
            "layers.1.mlp.up_proj.weight": random(48, HIDDEN),
            "layers.1.mlp.down_proj.weight": random(HIDDEN, 48),
        },
    ),
    "biases": (
        {},
        {
            f"{LAYER}.self_attn.q_proj.bias": random(64),
            f"{LAYER}.self_attn.k_proj.bias": random(32),
            f"{LAYER}.self_attn.v_proj.bias": random(32),
            f"{LAYER}.self_attn.o_proj.bias": random(HIDDEN),
            f"{LAYER}.mlp.gate_proj.bias": random(48),
            f"{LAYER}.mlp.up_proj.bias": random(48),
            f"{LAYER}.mlp.down_proj.bias": random(HIDDEN),
        },
    ),
    "the whole vocabulary": (
        {"draft_vocab_size": VOCAB_SIZE},
        {"lm_head.weight": random(VOCAB_SIZE, HIDDEN)},
    ),
}


def variant_of(
    kind: str, folder: Path, reference: Any, config: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    """A head of this kind with other values and tensors; the whole vocabulary needs no list."""
    save_head(kind, folder, reference, seed=5)
    values = json.loads((folder / "config.json").read_text()) | config
    stored = load_file(folder / "model.safetensors") | tensors
    if config.get("draft_vocab_size") == VOCAB_SIZE:
        stored = {name: each for name, each in stored.items() if name not in ("d2t", "t2d")}
    return write(folder, values, stored)


def padded(features: Tensor, num_layers: int, new: int) -> Tensor:
    """As the enlarged target's: each layer's with zeros behind."""
    parts = features.chunk(num_layers, dim=-1)
    return torch.cat([functional.pad(part, (0, new - part.shape[-1])) for part in parts], -1)


def assert_drafts_the_same(small: Head, large: Head) -> None:
    lens, num_layers = (1, 7, 23), max(len(small.spec.layers), 1)
    generator = torch.Generator().manual_seed(1)
    features = [torch.randn(n, small.spec.num_features, generator=generator) for n in lens]
    ids = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator) for n in lens]
    wider = [padded(each, num_layers, large.spec.hidden_size) for each in features]
    found = HeadRun(large, len(lens), 32).draft(wider, ids, DEPTH, chunk=9)
    expected = HeadRun(small, len(lens), 32).draft(features, ids, DEPTH, chunk=9)
    for ours, plain in zip(found, expected, strict=True):
        size = plain.states.shape[-1]
        assert ours.states[:, size:].eq(0).all() and ours.draft_states[:, size:].eq(0).all()
        states, draft_states = ours.states[:, :size], ours.draft_states[:, :size]
        assert_same(Drafted(states, draft_states, ours.logits[:, :VOCAB_SIZE]), plain)


@pytest.mark.model
@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
def test_every_variant_of_an_eagle3_head_keeps_its_function(
    variant: str, target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    head = variant_of("eagle3", tmp_path, reference, *EAGLE3_VARIANTS[variant])
    small = load(head, load_spec(folder), folder)
    assert_drafts_the_same(small, enlarged(head, folder))


@pytest.mark.model
@pytest.mark.parametrize("kind", [HeadKind.MEDUSA, HeadKind.MLP])
def test_heads_of_the_other_kinds_keep_their_function(
    kind: HeadKind, target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    head = save_head(kind, tmp_path, reference, seed=5)
    assert_drafts_the_same(load(head, load_spec(folder), folder), enlarged(head, folder))


@pytest.mark.model
def test_an_mlp_speculator_of_tied_levels_keeps_its_function(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    head = save_head(HeadKind.MLP, tmp_path, reference, seed=5)
    values = json.loads((head / "config.json").read_text())
    values |= {"tie_weights": True, "scale_input": False}
    stored = load_file(head / "model.safetensors")
    tied = {name: each for name, each in stored.items() if ".0." in name or "proj.1." in name}
    write(head, values, tied)
    assert_drafts_the_same(load(head, load_spec(folder), folder), enlarged(head, folder))


@pytest.mark.model
def test_medusa_heads_keep_their_function_under_other_names(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    head = save_head(HeadKind.MEDUSA, tmp_path, reference, seed=5)
    values = json.loads((head / "config.json").read_text())
    renamed = {
        re.sub(
            r"^(\d)\.1\.", r"lm_heads.\1.", re.sub(r"^(\d)\.0\.linear", r"blocks.\1.layers.0", name)
        ): each
        for name, each in load_file(head / "model.safetensors").items()
    }
    write(head, values, renamed)
    assert_drafts_the_same(load(head, load_spec(folder), folder), enlarged(head, folder))


@pytest.mark.model
def test_an_eagle3_head_of_another_width_than_its_target_keeps_its_function(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    narrow = SimpleNamespace(config=SimpleNamespace(**(SIZES | WIDE)))
    head = save_head("eagle3", tmp_path, narrow, seed=5)
    own = WIDE["hidden_size"]
    extra = {
        "fc.weight": random(own, 3 * HIDDEN),
        "embed_tokens.weight": random(VOCAB_SIZE, own),
    }
    config = {"target_hidden_size": HIDDEN}
    values = json.loads((head / "config.json").read_text()) | config
    write(head, values, load_file(head / "model.safetensors") | extra)
    assert_drafts_the_same(load(head, load_spec(folder), folder), enlarged(head, folder))


# -- what it costs, and what cannot be done -------------------------------------------------------


def test_the_padding_of_a_draft_vocabulary_leads_behind_the_targets(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    head = save_head("eagle3", tmp_path, reference)
    config, weights = inflated_parts(head, folder)
    known = VOCAB_SIZE - 2
    ids = torch.arange(40) + weights.read("d2t", (40,), dtype=torch.int64)
    assert sorted(ids[:known].tolist()) == list(range(known))
    assert ids[known:].tolist() == list(range(VOCAB_SIZE, VOCAB_SIZE + 40 - known))
    lm_head = weights.read("lm_head.weight", (40, TARGET.hidden_size))
    assert not lm_head.eq(0).any()  # all of it is read and multiplied
    assert config.spec.vocab_size == VOCAB_SIZE + 40 - known


def test_an_enlarged_head_has_the_sizes_of_its_shape(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = target
    config, weights = inflated_parts(save_head("eagle3", tmp_path, reference), folder)
    assert isinstance(config, Eagle3Config)
    layer = config.layer
    assert (layer.hidden_size, layer.intermediate_size) == (72, 80)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (12, 3, 32)
    assert config.spec.num_features == 3 * 72
    assert config.spec.num_params == sum(map(math.prod, weights.shapes.values()))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {f"{LAYER}.self_attn.q_norm.weight": norm(16)}, "norms of queries and keys"),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, {}, "query heads share a key head"),
        ({"hidden_size": 80}, {}, "hidden_size is 72 but the model has 80"),
    ],
)
def test_heads_whose_function_would_change_are_refused(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    message: str,
    target: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    folder, reference = target
    head = variant_of("eagle3", tmp_path, reference, config, tensors)
    with pytest.raises(ModelError, match=message):
        inflated_parts(head, folder)


def inflated_parts(head: Path, target: Path) -> tuple[HeadConfig, InflatedHead]:
    small = open_weights(head)
    config = head_config(read_json(head / "config.json"), small.names, load_spec(target))
    assert config is not None
    return inflate_head(config, small, SHAPE, torch.float32)
