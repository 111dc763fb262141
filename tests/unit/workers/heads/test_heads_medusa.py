"""Medusa heads against the method in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_tools import (
    BACKENDS,
    Drafted,
    HeadRun,
    assert_same,
    load,
    random_weights,
    target_spec,
    write,
)
from torch import Tensor

from outrider.checkpoints.files import Files
from outrider.errors import ModelError
from outrider.workers.heads.formats import head_kind, kind_of, load_head_spec

pytestmark = pytest.mark.model
HIDDEN, VOCAB, HEADS = 32, 96, 3
LENGTHS = (1, 4, 9)
# As the first public checkpoints have it: no sizes, no model_type, and too few heads.
OLD: dict[str, Any] = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
NEW: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_heads": HEADS,
    "num_hidden_layers": 2,
    "truncated_vocab_size": VOCAB,
}


def weights_of(num_blocks: int) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for block in range(num_blocks):
            shapes[f"{head}.{block}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{block}.linear.bias"] = (HIDDEN,)
        shapes[f"{head}.{num_blocks}.weight"] = (VOCAB, HIDDEN)
    weights = random_weights(shapes)
    return weights


def plain_draft(weights: dict[str, Tensor], num_blocks: int, features: Tensor) -> Drafted:
    wide = {name: value.double() for name, value in weights.items()}
    logits = []
    for head in range(HEADS):
        x = features[-1].double()
        for block in range(num_blocks):
            name = f"{head}.{block}.linear"
            x = x + F.silu(F.linear(x, wide[f"{name}.weight"], wide[f"{name}.bias"]))
        logits.append(F.linear(x, wide[f"{head}.{num_blocks}.weight"]))
    return Drafted(features, features[-1].repeat(HEADS - 1, 1), torch.stack(logits))


def compare(
    folder: Path, weights: dict[str, Tensor], num_blocks: int, backend: str | None = None
) -> None:
    head = load(folder, target_spec(), backend=backend)
    generator = torch.Generator().manual_seed(11)
    features = [torch.randn(length, HIDDEN, generator=generator) for length in LENGTHS]
    ids = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    run = HeadRun(head, len(LENGTHS), max(LENGTHS) + HEADS)
    drafted = run.draft(features, ids, HEADS, 5)
    for ours, feature in zip(drafted, features, strict=True):
        assert_same(ours, plain_draft(weights, num_blocks, feature))
    assert len({token for each in drafted for token in each.drafts}) >= 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_heads_draft_what_the_method_in_plain_torch_drafts(
    prefix: str, backend: str | None, tmp_path: Path
) -> None:
    weights = weights_of(num_blocks=2)
    stored = {f"{prefix}{name}": value for name, value in weights.items()}
    compare(write(tmp_path, NEW, stored), weights, 2, backend)


def test_an_old_checkpoint_has_as_many_heads_as_its_file(tmp_path: Path) -> None:
    weights = weights_of(num_blocks=1)
    folder = write(tmp_path, OLD, weights, file="medusa_lm_head.pt")
    assert kind_of(folder) == "medusa"
    spec = load_head_spec(folder, target_spec())
    assert (spec.kind, spec.max_depth, spec.made_for) == ("medusa", 3, "lmsys/vicuna-7b-v1.3")
    assert (spec.hidden_size, spec.vocab_size) == (HIDDEN, VOCAB)
    assert (spec.layers, spec.num_features, spec.keeps_kv) == ((), HIDDEN, False)
    assert spec.num_params == sum(value.numel() for value in weights.values())
    compare(folder, weights, 1)


def test_without_weights_what_the_configuration_says_is_all_that_is_known(tmp_path: Path) -> None:
    folder = write(tmp_path, OLD, weights_of(1), file="medusa_lm_head.pt")
    assert load_head_spec(folder, target_spec(), needed=Files.TEXT).max_depth == 2


def test_heads_beside_the_weights_of_their_target_are_found(tmp_path: Path) -> None:
    weights = weights_of(num_blocks=1)
    folder = write(tmp_path, OLD, weights, file="medusa_lm_head.safetensors")
    write(tmp_path, OLD, {"model.norm.weight": torch.ones(HIDDEN)})
    compare(folder, weights, 1)


def test_the_names_that_vllm_gives_are_known(tmp_path: Path) -> None:
    weights = weights_of(num_blocks=2)
    stored = {}
    for name, value in weights.items():
        head, block, rest = name.split(".", 2)
        stored[
            f"lm_heads.{head}.weight"
            if rest == "weight"
            else f"blocks.{head}.layers.{block}.{rest.removeprefix('linear.')}"
        ] = value
    compare(write(tmp_path, NEW, stored), weights, 2)


def test_a_configuration_that_says_nothing_is_told_by_its_tensors() -> None:
    assert head_kind({}, ["medusa_heads.0.0.linear.weight", "medusa_heads.0.1.weight"]) == "medusa"
    assert head_kind({}, ["0.0.linear.weight", "0.1.weight"]) == "medusa"
    assert head_kind({}, ["model.layers.0.mlp.up_proj.weight"]) is None


def test_a_head_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = write(tmp_path, OLD, weights_of(1), file="medusa_lm_head.pt")
    with pytest.raises(ModelError, match=r"0\.0\.linear\.weight with shape \[32, 32\].*\[48, 48\]"):
        load(folder, target_spec(48))


def test_a_missing_head_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path, NEW | {"num_heads": 4}, weights_of(2))
    with pytest.raises(ModelError, match=r"no tensor '3\.0\.linear\.weight'"):
        load(folder, target_spec())


def test_a_part_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, NEW | {"truncated_vocab_size": 50}, weights_of(2))
    with pytest.raises(ModelError, match="truncated_vocab_size of this medusa head is 50"):
        load(folder, target_spec())
