"""Which checkpoints are heads, what their configurations mean, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub
from head_tools import load, random_weights, target_spec, write

from outrider.checkpoints.resolve import BUNDLED_DRAFT
from outrider.errors import ModelError
from outrider.workers.heads.configs import Eagle3Config
from outrider.workers.heads.formats import (
    head_config,
    head_kind,
    head_spec,
    kind_of,
    load_head_spec,
)
from outrider.workers.heads.kv import head_bytes_per_block, head_kv
from outrider.workers.models.spec import ModelSpec

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 96,
}
ORIGINAL: dict[str, Any] = LAYER | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 40,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": LAYER,
}
EAGLE3_NAMES = ["fc.weight", "midlayer.hidden_norm.weight"]
EAGLE1_NAMES = ["fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight", "embed_tokens.weight"]


def eagle3(config: dict[str, Any], names: list[str] | None = None) -> Eagle3Config:
    found = head_config(config, names, target_spec())
    assert isinstance(found, Eagle3Config)
    return found


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (ORIGINAL, "eagle3"),
        (SPECULATORS, "eagle3"),
        (LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        (LAYER | {"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 5}, "medusa"),
        (LAYER | {"architectures": ["LlamaForCausalLM"]}, None),
        ({}, None),
    ],
)
def test_a_configuration_says_which_head_it_is_of(config: dict[str, Any], kind: str | None) -> None:
    assert head_kind(config) == kind
    assert (head_spec(config, None, target_spec()) is None) == (kind is None)


def test_tensors_tell_where_a_configuration_is_an_ordinary_models() -> None:
    assert head_kind(LAYER, ["fc.weight", "midlayer.hidden_norm.weight"]) == "eagle3"
    assert head_kind(LAYER, ["model.fc.weight", "model.layers.0.hidden_norm.weight"]) == "eagle3"
    assert head_kind(LAYER, ["speculator.proj.0.weight"]) == "mlp_speculator"
    assert head_kind(LAYER, ["model.layers.0.input_layernorm.weight"]) is None


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LAYER | {"architectures": ["EagleLlamaForCausalLM"]}, None),
        (LAYER | {"architectures": ["EAGLEModel"], "model_type": "eagle"}, None),
        ({"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"]}, None),
        (LAYER, EAGLE1_NAMES),
        (ORIGINAL, EAGLE1_NAMES),
    ],
)
def test_the_first_eagle_is_refused_by_name(
    config: dict[str, Any], names: list[str] | None
) -> None:
    with pytest.raises(ModelError, match=r"EAGLE-1 .* take an EAGLE-3 head"):
        head_kind(config, names)


def test_tensors_are_asked_only_of_what_is_known_to_be_a_head(tmp_path: Path) -> None:
    folder = write(tmp_path, LAYER, {name: torch.zeros(2) for name in EAGLE1_NAMES})
    assert kind_of(folder) is None
    with pytest.raises(ModelError, match="EAGLE-1"):
        kind_of(folder, by_tensors=True)
    write(folder, {}, {"0.0.linear.weight": torch.zeros(2)})
    assert kind_of(folder, by_tensors=True) == "medusa"


def test_the_first_eagle_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    weights = {name: torch.zeros(2) for name in EAGLE1_NAMES}
    folder = write(tmp_path, LAYER, weights, file="pytorch_model.bin")
    with pytest.raises(ModelError, match="EAGLE-1"):
        load(folder, target_spec())
    with pytest.raises(ModelError, match="EAGLE-1"):
        load_head_spec(folder, target_spec())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
        (
            {"transformer_layer_config": LAYER | {"num_hidden_layers": 17}},
            "num_hidden_layers of this eagle3 head is 17",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        (
            {"transformer_layer_config": LAYER | {"num_experts": 8}},
            "mixture of 8 experts",
        ),
        ({"draft_vocab_size": "many"}, "value of the wrong type"),
        (
            {"transformer_layer_config": LAYER | {"hidden_act": "relu"}},
            "hidden_act is 'relu'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_one_sentence(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        head_spec(SPECULATORS | changes, None, target_spec())


def test_layers_are_those_that_the_original_reads_unless_stated() -> None:
    smollm2 = target_spec(num_layers=30)
    spec = head_spec(ORIGINAL, None, smollm2)
    assert spec is not None
    assert spec.layers == (2, 15, 27)
    assert spec.num_features == 3 * 32


def test_stated_layers_are_literal_at_the_top_and_outputs_inside_eagle_config() -> None:
    """What leaves a layer enters the one behind it."""
    assert eagle3(SPECULATORS | {LAYER_IDS: [1, 5, 8]}).spec.layers == (1, 5, 8)
    assert eagle3(SPECULATORS | {LAYER_IDS: None}).spec.layers == (2, 6, 9)
    inside = {"eagle_config": {LAYER_IDS: [1, 5, 8], "use_aux_hidden_state": True}}
    assert eagle3(ORIGINAL | inside).spec.layers == (2, 6, 9)
    assert eagle3(ORIGINAL | {"eagle_config": {LAYER_IDS: []}}).spec.layers == (2, 6, 9)
    assert eagle3(ORIGINAL | {"eagle_config": {"layer_ids": [1, 5, 8]}}).spec.layers == (1, 5, 8)


def test_features_are_in_the_order_of_the_layers_however_they_are_listed() -> None:
    assert eagle3(SPECULATORS | {LAYER_IDS: [8, 1, 5]}).spec.layers == (1, 5, 8)
    assert eagle3(ORIGINAL | {"eagle_config": {LAYER_IDS: [8, 1, 5]}}).spec.layers == (2, 6, 9)


def test_layers_that_the_target_has_not_are_refused() -> None:
    with pytest.raises(ModelError, match=r"layers \[2, 1, -1\] of its target, which has 2"):
        head_spec(ORIGINAL, None, target_spec(num_layers=2))
    spec = eagle3(SPECULATORS | {LAYER_IDS: [2, 6, 13]}).spec
    with pytest.raises(
        ModelError, match=r"'some/target'\) reads the input of layer 13 .* 12 layer"
    ):
        spec.check_fits(target_spec(num_layers=12))
    spec.check_fits(target_spec(num_layers=13))


def test_the_residual_is_unnormed_unless_the_configuration_says_otherwise() -> None:
    """One public reader takes silence for the opposite."""
    assert not eagle3(SPECULATORS).norm_before_residual
    assert eagle3(SPECULATORS | {"norm_before_residual": True}).norm_before_residual


def test_a_later_norm_is_told_by_its_tensors_unless_it_is_denied() -> None:
    hidden_norm = "midlayer.hidden_norm.weight"
    names = ["fc.weight", hidden_norm, "input_norm.weight", "fc_norm.0.weight"]
    found = eagle3(ORIGINAL, names)
    assert found.norm_before_fc
    assert found.fc_norm
    denied = eagle3(ORIGINAL | {"norm_before_fc": False, "fc_norm": False}, names)
    assert not denied.norm_before_fc
    assert not denied.fc_norm


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", (4096, 11008, 32, 32, 128, 32000)),
        ("qwen3", (4096, 22016, 32, 32, 128, 151936)),
        (None, (4096, 22016, 32, 32, 128, 151936)),
    ],
)
def test_what_speculators_leaves_out_of_a_layer_is_the_default_of_its_kind(
    kind: str | None, expected: tuple[int, ...]
) -> None:
    stated = {"num_hidden_layers": 1} | ({"model_type": kind} if kind else {})
    layer = eagle3(SPECULATORS | {"transformer_layer_config": stated}).layer
    assert expected == (
        layer.hidden_size,
        layer.intermediate_size,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.vocab_size,
    )


def test_rotation_is_the_heads_own() -> None:
    def theta(config: dict[str, Any]) -> float:
        rope = eagle3(config).layer.rope
        assert rope is not None
        return rope.theta

    assert theta(ORIGINAL) == 10_000.0
    assert theta(ORIGINAL | {"rope_theta": 5e5}) == 5e5
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}
    assert theta(SPECULATORS | {"transformer_layer_config": LAYER | nested}) == 7e5


def test_a_head_narrower_than_its_target_reads_features_of_the_target() -> None:
    spec = eagle3(ORIGINAL | {"target_hidden_size": 64}).spec
    assert (spec.hidden_size, spec.state_size, spec.num_features) == (64, 32, 192)
    with pytest.raises(ModelError, match="hidden size of 64, and the target's is 32"):
        spec.check_fits(target_spec(32))


def test_the_size_of_a_head_is_that_of_its_weights() -> None:
    spec = eagle3(ORIGINAL).spec
    layer = 64 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48
    assert spec.num_params == 32 * 96 + layer + 32 * (96 + 40)
    own = eagle3(ORIGINAL, [*EAGLE3_NAMES, "embed_tokens.weight"]).spec
    assert own.num_params == spec.num_params
    assert eagle3(ORIGINAL, EAGLE3_NAMES).spec.num_params == spec.num_params - 32 * 96


def test_a_target_of_experts_is_refused_where_it_is_read() -> None:
    with pytest.raises(ModelError, match="mixture of 8 experts"):
        ModelSpec.from_hf(LAYER | {"num_local_experts": 8})


def test_ordinary_models_and_folders_without_configuration_are_no_heads(tmp_path: Path) -> None:
    assert kind_of(tmp_path) is None
    assert kind_of(BUNDLED_DRAFT) is None
    (tmp_path / "config.json").write_text(json.dumps(LAYER))
    assert kind_of(tmp_path) is None
    write(tmp_path, LAYER, random_weights({"model.norm.weight": (32,)}))
    with pytest.raises(ModelError, match=r"holds no head of a known kind \(eagle3, medusa, mlp"):
        load(tmp_path, target_spec())
    with pytest.raises(ModelError, match="holds no head"):
        load_head_spec(tmp_path, target_spec())


def test_asking_whether_a_folder_is_a_head_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL))
    code = (
        "import sys; from outrider.workers.heads.formats import kind_of;"
        f"print(kind_of({str(tmp_path)!r}), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["eagle3", "False"]


def test_missing_and_wrong_tensors_are_named_with_their_shapes(tmp_path: Path) -> None:
    others = {"midlayer.hidden_norm.weight": (32,), "embed_tokens.weight": (96, 32)}
    for file in ("model.safetensors", "pytorch_model.bin"):
        folder = tmp_path / file.partition(".")[0]
        wrong = random_weights({"fc.weight": (32, 64), **others})
        write(folder, ORIGINAL, wrong, file=file)
        with pytest.raises(ModelError, match=r"fc\.weight with shape \[32, 64\].*\[32, 96\]"):
            load(folder, target_spec())
        write(folder, ORIGINAL, random_weights({"fc.weight": (32, 96), **others}), file=file)
        with pytest.raises(ModelError, match=r"no tensor 'midlayer\.input_layernorm\.weight'"):
            load(folder, target_spec())


class FolderMaker:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    folder = write(tmp_path, ORIGINAL, {})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": FolderMaker(tmp_path / "made")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"code that a checkpoint brings along is never run"):
        load(folder, target_spec())
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("contents", [b"", b"garbage", [1, 2], {"fc.weight": 3}])
def test_a_damaged_or_strange_file_of_weights_is_refused_by_name(
    contents: Any, tmp_path: Path
) -> None:
    path = tmp_path / "medusa_lm_head.pt"
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    else:
        torch.save(contents, path)
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt (is|holds)"):
        load(tmp_path, target_spec())


def test_weights_saved_by_an_old_torch_are_read(tmp_path: Path) -> None:
    weights = random_weights({"fc.weight": (32, 64), "midlayer.hidden_norm.weight": (32,)})
    folder = write(tmp_path, ORIGINAL, {})
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"fc\.weight with shape \[32, 64\]"):
        load(folder, target_spec())


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL))
    (tmp_path / "training_args.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no model\.safetensors, pytorch_model\.bin or medusa_lm"):
        load(tmp_path, target_spec())


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_weights_come_from_a_hub_only_where_there_are_no_others(
    file: str, tmp_path: Path
) -> None:
    weights = random_weights({"0.0.linear.weight": (32, 32), "0.1.weight": (96, 32)})
    for each in ("pytorch_model.bin", file):
        write(tmp_path / "files", {"medusa_num_heads": 1}, weights, file=each)
    served = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    code = (
        "from head_tools import target_spec;"
        "from outrider.workers.heads.formats import kind_of, load_head_spec;"
        "print(kind_of('somebody/head'), load_head_spec('somebody/head', target_spec()).max_depth)"
    )
    with FakeHub("somebody/head", served) as hub:
        environment = os.environ | hub.environment(tmp_path)
        environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).resolve().parents[3])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.split() == ["medusa", "1"], done.stderr
        assert len(hub.downloads(file)) == 1
        assert len(hub.downloads(".bin")) == (file == "pytorch_model.bin")


def test_only_a_head_that_attends_has_a_cache() -> None:
    spec = eagle3(ORIGINAL).spec
    kv = head_kv(spec, 5, 4, torch.float32, "cpu")
    assert kv is not None
    assert [tuple(each.shape) for each in kv.keys + kv.values] == [(5, 2, 4, 8)] * 2
    assert (kv.num_blocks, kv.block_size) == (5, 4)
    assert head_bytes_per_block(spec, 4, torch.float32) * 5 == 2 * kv.keys[0].nbytes
    medusa = head_spec({"medusa_num_heads": 2}, None, target_spec())
    assert medusa is not None
    assert head_kv(medusa, 5, 4, torch.float32, "cpu") is None
    assert head_bytes_per_block(medusa, 4, torch.float32) == 0
