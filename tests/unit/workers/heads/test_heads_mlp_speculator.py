"""MLP speculators against the method in plain torch."""

from __future__ import annotations

import math
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

from outrider.errors import ModelError
from outrider.workers.heads.formats import kind_of, load_head_spec

pytestmark = pytest.mark.model
EMB, VOCAB, LEVELS = 32, 96, 3
LENGTHS = (1, 4, 9)
CONFIG: dict[str, Any] = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": EMB,
    "inner_dim": 24,
    "n_candidates": 5,
    "n_predict": LEVELS,
    "scale_input": True,
    "tie_weights": False,
    "top_k_tokens_per_head": [4, 3, 2],
    "vocab_size": VOCAB,
}


def weights_of(config: dict[str, Any]) -> dict[str, Tensor]:
    inner, is_tied = config["inner_dim"] or EMB, config["tie_weights"]
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(LEVELS):
        if index < 2 or not is_tied:
            shapes[f"speculator.proj.{index}.weight"] = (inner, inner if index else EMB)
        if index < 1 or not is_tied:
            shapes[f"speculator.emb.{index}.weight"] = (VOCAB, inner)
            shapes[f"speculator.head.{index}.weight"] = (VOCAB, inner)
            shapes[f"speculator.ln.{index}.weight"] = (inner,)
            shapes[f"speculator.ln.{index}.bias"] = (inner,)
    return random_weights(shapes)


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def plain_draft(
    config: dict[str, Any], weights: dict[str, Tensor], features: Tensor, ids: Tensor
) -> Drafted:
    wide = {name.removeprefix("speculator."): value.double() for name, value in weights.items()}
    inner, is_tied = config["inner_dim"] or EMB, config["tie_weights"]
    state_weight = 0.5 ** (0.5 / LEVELS)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)

    def run(state: Tensor, tokens: Tensor, level: int) -> Tensor:
        own = 0 if is_tied else level
        projected = F.linear(state, wide[f"proj.{min(level, 1) if is_tied else level}.weight"])
        mixed = projected + wide[f"emb.{own}.weight"][tokens] * (emb_weight / state_weight)
        return F.gelu(normed(mixed) * wide[f"ln.{own}.weight"] + wide[f"ln.{own}.bias"])

    hidden = features.double()
    states = run(normed(hidden) / math.sqrt(2) if config["scale_input"] else hidden, ids, 0)
    stepped = [states[-1]]
    logits: list[Tensor] = []
    for level in range(LEVELS):
        if level > 0:
            stepped.append(run(stepped[-1], logits[-1].argmax(), level))
        head = wide[f"head.{0 if is_tied else level}.weight"]
        logits.append(F.linear(stepped[-1], head))
    return Drafted(states, torch.stack(stepped[1:]), torch.stack(logits))


VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "unscaled input": {"scale_input": False},
    "tied": {"tie_weights": True},
    "inner_dim of 0 is emb_dim": {"inner_dim": 0},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_speculator_drafts_what_the_method_in_plain_torch_drafts(
    variant: str, backend: str | None, tmp_path: Path
) -> None:
    config = CONFIG | VARIANTS[variant]
    weights = weights_of(config)
    head = load(write(tmp_path, config, weights), target_spec(), backend=backend)
    generator = torch.Generator().manual_seed(11)
    features = [5 * torch.randn(length, EMB, generator=generator) for length in LENGTHS]
    ids = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    plain = [plain_draft(config, weights, *each) for each in zip(features, ids, strict=True)]
    run = HeadRun(head, len(LENGTHS), max(LENGTHS) + LEVELS)
    for ours, expected in zip(run.draft(features, ids, LEVELS, 5), plain, strict=True):
        assert_same(ours, expected)
    assert len({token for each in plain for token in each.drafts}) >= 3


def test_its_sizes_are_known_without_its_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIG, weights_of(CONFIG))
    assert kind_of(folder) == "mlp_speculator"
    spec = load_head_spec(folder, target_spec())
    assert (spec.kind, spec.max_depth, spec.state_size) == ("mlp_speculator", LEVELS, 24)
    assert (spec.layers, spec.num_features, spec.keeps_kv) == ((), EMB, False)
    assert spec.num_params == sum(value.numel() for value in weights_of(CONFIG).values())


def test_tied_sizes_count_shared_weights_once(tmp_path: Path) -> None:
    config = CONFIG | {"tie_weights": True}
    weights = weights_of(config)
    spec = load_head_spec(write(tmp_path, config, weights), target_spec())
    assert spec.num_params == sum(value.numel() for value in weights.values())


def test_a_speculator_for_another_target_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIG, weights_of(CONFIG))
    with pytest.raises(ModelError, match="hidden size of 32, and the target's is 48"):
        load(folder, target_spec(48))
    with pytest.raises(ModelError, match="vocabulary of 96, and the target's is 100"):
        load(folder, target_spec(vocab_size=100))


def test_a_norm_without_its_bias_is_refused_by_name(tmp_path: Path) -> None:
    weights = weights_of(CONFIG)
    del weights["speculator.ln.1.bias"]
    with pytest.raises(ModelError, match=r"no tensor 'speculator\.ln\.1\.bias'"):
        load(write(tmp_path, CONFIG, weights), target_spec())
