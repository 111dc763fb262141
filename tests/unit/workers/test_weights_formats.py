"""Configurations of quantized checkpoints: what is understood, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import (
    FORMS,
    INT_FORMS,
    Form,
    Ints,
    compressed,
    group,
    packed_group,
    write,
)
from safetensors.torch import load_file, save_file

from outrider.errors import ModelError
from outrider.kernels.reference import ReferenceOps
from outrider.workers.models.shard import Shard
from outrider.workers.weights.checkpoint import load_spec
from outrider.workers.weights.formats.registry import schemes_in, schemes_of
from outrider.workers.weights.formats.schemes import Fp8Scheme, Inputs
from outrider.workers.weights.loader import load_model

PROJECTION = "model.layers.0.self_attn.q_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
PACKED = compressed() | {"format": "pack-quantized"}
FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CHANNELS = compressed(group("channel", "token", "Linear"))


def said_of(quantization_config: Any) -> str:
    with pytest.raises(ModelError) as caught:
        schemes_of({"quantization_config": quantization_config})
    return str(caught.value)


def test_reading_what_a_config_says_needs_no_torch() -> None:
    code = (
        "import sys, outrider.workers.weights.formats.registry as it; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_group_that_names_a_layer_goes_before_one_for_all() -> None:
    given = compressed(
        group("channel", "token", "Linear"),
        group("tensor", "static", "re:.*q_proj", "model.layers.1.mlp.down_proj"),
    )
    schemes = schemes_of({"quantization_config": given})
    assert schemes is not None
    named = Fp8Scheme(Inputs.STATIC)
    assert schemes.of(PROJECTION, True) == named
    assert schemes.of("model.layers.1.mlp.down_proj", True) == named
    assert schemes.of("model.layers.0.mlp.down_proj", True) == Fp8Scheme(Inputs.DYNAMIC)
    assert schemes.of("lm_head", False) is None


def test_layers_have_the_scheme_that_compressed_tensors_gives_them() -> None:
    """Exact names go first, wherever their group is; of equal targets the last."""
    given = compressed(
        group("channel", "whole", "Linear", "re:.*_proj$"),
        group("tensor", "static", PROJECTION),
        group("channel", "token", "re:.*self_attn.*", "Linear"),
    )
    schemes = schemes_of({"quantization_config": given})
    assert schemes is not None
    assert schemes.of(PROJECTION, True) == Fp8Scheme(Inputs.STATIC)
    assert schemes.of("model.layers.1.self_attn.q_proj", True) == Fp8Scheme(Inputs.WHOLE)
    assert schemes.of("model.layers.1.mlp.up", True) == Fp8Scheme(Inputs.DYNAMIC)


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:.*self_attn\.(q|k|v)_proj$",
        r"re:model\.layers\.(0|1|2|3|10|11|12)\..*",
        r"re:.*mlp\.(?:gate|up|down)_proj",
        r"re:model\.layers\.[0-9]+\.self_attn.*proj",
        "re:.*lm_head",
        "re:(?!.*mlp).*",
        "re:.*self_attn.(q_proj|k_proj).*(weight)?$",
        "re:model.layers.(" + "|".join(map(str, range(80))) + ").*(q|k|v)_proj",
        "re:vision_tower.*",
    ],
)
def test_expressions_that_checkpoints_use_are_taken(pattern: str) -> None:
    given = compressed(group("channel", "token", "Linear"), ignore=(pattern,))
    assert schemes_of({"quantization_config": given}) is not None


def test_older_spellings_are_read() -> None:
    given = CHANNELS | {"quantization_status": "frozen", "format": "naive-quantized"}
    assert schemes_of({"compression_config": given}) == schemes_of({"quantization_config": given})
    found = schemes_of({"quantization_config": FP8 | {"weight_block_size": "128x128"}})
    assert found == schemes_of({"quantization_config": FP8 | {"weight_block_size": [128, 128]}})


def test_configs_of_other_tools_are_read() -> None:
    def scheme(**changes: Any) -> Any:
        schemes = schemes_of({"quantization_config": GPTQ | changes})
        assert schemes is not None
        return schemes.of(PROJECTION, True)

    assert scheme(checkpoint_format=None, dynamic={"-:.*lm_head": {}}) == scheme()
    assert scheme(format="gptq_v2") == scheme(checkpoint_format="gptq_v2") != scheme()


@pytest.mark.parametrize(
    ("form", "name"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")]
)
def test_older_files_say_what_config_json_does_not(form: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, INT_FORMS[form])
    expected = schemes_in(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / name).write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert expected is not None and schemes_in(tmp_path) == expected


def test_a_group_size_beyond_the_inputs_is_all_of_them(tmp_path: Path) -> None:
    write(tmp_path, INT_FORMS["awq: one group"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 2**20
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_model(tmp_path, ops=ReferenceOps(), dtype=torch.float32, device="cpu")


def test_a_file_that_speaks_of_the_kv_cache_alone_quantizes_no_weights(tmp_path: Path) -> None:
    beside = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    write(tmp_path, Form({}, others=lambda name, layer: None, beside=beside))
    assert schemes_in(tmp_path) is None


def repacked(**changes: Any) -> dict[str, Any]:
    given = packed_group(Ints("compressed"), "Linear")
    return PACKED | {"config_groups": {"a": given | {"weights": given["weights"] | changes}}}


def changed(numbers: str, **changes: Any) -> dict[str, Any]:
    given = group("channel", "token", "Linear")
    return compressed(given | {numbers: given[numbers] | changes})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("gptq", "quantization_config is 'gptq', and has to be an object"),
        ({"quant_method": ["fp8"]}, "weights are quantized by ['fp8'], which is not read"),
        ({"bits": 4}, "weights are quantized by None"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme is 'none', which is not supp"),
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2', which is not supported"),
        (FP8 | {"scale_fmt": "ue8m0"}, "quantization_config.scale_fmt is 'ue8m0'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is [128], and has to be two sizes"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size is 0, and has to be a whole n"),
        (FP8 | {"weight_block_size": [-1, 8]}, "weight_block_size is -1, and has to be"),
        (FP8 | {"weight_block_size": [128, 2**40]}, "weight_block_size is 1099511627776"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', which is no"),
        ({"quant_method": "modelopt", "quant_algo": [1]}, "quant_algo is [1], which is not supp"),
        (compressed() | {"config_groups": None}, "has no config_groups"),
        (CHANNELS | {"format": "int-quantized"}, "format is 'int-quantized', which is not supp"),
        (PACKED | {"config_groups": {"a": {}}}, "config_groups.a has no weights"),
        (repacked(num_bits=3), "weights.num_bits is 3, which is not supported"),
        (repacked(group_size=-7), "weights.group_size is -7, and has to be"),
        (repacked(group_size=2**50), "weights.group_size is 1125899906842624, and has to be"),
        (repacked(strategy="tensor_group"), "weights.strategy is 'tensor_group'"),
        (
            compressed(group("channel", "token", "Linear") | {"weights": FOUR_BITS})
            | {"format": "pack-quantized"},
            "input_activations is set, and inputs of packed weights are not rounded here",
        ),
        (AWQ | {"bits": 3}, "quantization_config.bits is 3, which is not supported"),
        (AWQ | {"version": "gemv"}, "quantization_config.version is 'gemv'"),
        (AWQ | {"zero_point": 1}, "quantization_config.zero_point is 1, which is not supported"),
        (AWQ | {"group_size": None}, "quantization_config.group_size is None, and has to be"),
        (GPTQ | {"bits": 2}, "quantization_config.bits is 2, which is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', which is not"),
        (GPTQ | {"dynamic": {"+:.*": {}}}, "dynamic gives layers numbers of bits of their own"),
        (GPTQ | {"group_size": 0}, "quantization_config.group_size is 0, and has to be"),
        (CHANNELS | {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        (compressed(group("channel", "token", "re:(")), "holds a regular expression that is none"),
        (CHANNELS | {"ignore": ["re:(a|.|.)*x"]}, "'(a|.|.)*x', which could take very long"),
        (CHANNELS | {"ignore": ["re:" + 30 * "a?"]}, "which could take very long"),
        (CHANNELS | {"ignore": ["re:" + 30 * "(a|.)"]}, "which could take very long"),
        (CHANNELS | {"ignore": ["re:" + 9 * ".*" + "x"]}, "which could take very long"),
        (CHANNELS | {"ignore": [f"re:{i}.*.*.*.*" for i in range(90)]}, "could take very long"),
        (repacked(num_bits=4.0), "weights.num_bits is 4.0, which is not supported"),
        (GPTQ | {"bits": 4.0}, "quantization_config.bits is 4.0, which is not supported"),
        (GPTQ | {"format": "gptq_v3"}, "quantization_config.format is 'gptq_v3', which is not"),
        (CHANNELS | {"ignore": [f"re:{i}" for i in range(300)]}, "300 regular expressions, and"),
        (CHANNELS | {"config_groups": {str(i): {} for i in range(99)}}, "has 99 groups, and may"),
        (CHANNELS | {"config_groups": {"x" * 2**20: None}}, "has an empty group"),
        (compressed(group("channel", "token")), "quantization_config names no layers"),
        (
            compressed(group("channel", "token", "Linear") | {"output_activations": {"a": 1}}),
            "group_0.output_activations is set, and outputs are not rounded here",
        ),
        (changed("input_activations", scale_dtype="torch.uint8"), "scale_dtype is 'torch.uint8'"),
        (CHANNELS | {"ignore": [3]}, "ignore is [3], and has to be a list of names"),
        (compressed({"targets": ["Linear"]}), "config_groups.group_0 has no weights"),
        (changed("weights", num_bits=4), "weights.num_bits is 4, which is not supported"),
        (changed("weights", type="int"), "weights.type is 'int', which is not supported"),
        (changed("weights", symmetric=False), "weights.symmetric is False"),
        (changed("weights", strategy="group"), "weights.strategy is 'group'"),
        (changed("input_activations", strategy="tensor"), "input_activations.strategy is 'tensor'"),
        (changed("input_activations", dynamic="local"), "input_activations.dynamic is 'local'"),
        (
            CHANNELS | {"transform_config": {"config_groups": {"a": 1}}},
            "quantization_config.transform_config asks for more than quantization",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: Any, sentence: str) -> None:
    said = said_of(config)
    assert sentence in said
    assert said.count(". ") == 0 and ("; " in said or ": " in said)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    write(folder, FORMS["compressed-tensors: tensor, static"])
    return folder


def damaged(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


@pytest.mark.parametrize(
    ("form", "name", "tensor", "sentence"),
    [
        ("awq", "qweight", torch.ones(3, 8, dtype=torch.int32), "with shape [3, 8], but the confi"),
        ("awq", "qweight", torch.ones(64, 8), "as F32, and packed numbers are I32"),
        ("awq", "qzeros", torch.ones(1, 8, dtype=torch.int32), "with shape [1, 8]"),
        ("awq", "scales", torch.ones(2, 63), "with shape [2, 63]"),
        ("awq", "scales", torch.full((2, 64), torch.nan), "with numbers that are no scales"),
        ("awq", "scales", None, "has no tensor 'model.layers.0.self_attn.q_proj.scales'"),
        ("gptq", "g_idx", torch.full((64,), 2), "g_idx names groups that are not among its 2"),
        ("gptq", "g_idx", torch.full((64,), -1), "g_idx names groups that are not among its 2"),
        (
            "gptq",
            "g_idx",
            torch.zeros(7, dtype=torch.int32),
            "with shape [7], but the configuration asks for [64]",
        ),
        ("compressed-tensors: 4 bits", "weight_packed", torch.ones(64, 8), "as F32, and packed"),
        ("compressed-tensors: 4 bits", "weight_shape", torch.tensor([64, 8]), "weight_shape of"),
        ("compressed-tensors: 4 bits", "weight_packed", None, "no tensor"),
    ],
)
def test_damaged_packed_weights_are_refused_in_a_sentence(
    tmp_path: Path, form: str, name: str, tensor: torch.Tensor | None, sentence: str
) -> None:
    whole = tmp_path / "whole"
    write(whole, INT_FORMS[form])
    folder = damaged(whole, tmp_path, replaced(f"{PROJECTION}.{name}", tensor))
    with pytest.raises(ModelError) as caught:
        load_model(folder, ops=ReferenceOps(), dtype=torch.float32, device="cpu")
    assert sentence in str(caught.value)


def replaced(name: str, tensor: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("weight_scale", None, "has no tensor 'model.layers.0.self_attn.q_proj.weight_scale'"),
        ("weight_scale", torch.ones(3), "with shape [3], but the configuration asks for [64, 1]"),
        ("weight_scale", torch.ones(64, 2), "with shape [64, 2]"),
        ("weight_scale", torch.tensor([torch.nan]), "with numbers that are no scales"),
        ("weight_scale", torch.tensor([-1.0]), "with numbers that are no scales"),
        ("weight_scale", torch.tensor([torch.inf]), "with numbers that are no scales"),
        ("weight_scale", torch.ones(1, dtype=torch.uint8), "as U8, and scales are F64 or F32 or"),
        ("weight_scale", torch.ones(1, dtype=torch.int64), "as I64, and scales are"),
        ("input_scale", None, "has no tensor 'model.layers.0.self_attn.q_proj.input_scale'"),
        ("input_scale", torch.ones(2), "with shape [2], but the configuration asks for [1]"),
        ("input_scale", torch.zeros(1), "input_scale of 0"),
        ("weight", torch.ones(64, 64), "is stored whole, but quantization_config says that it is"),
        ("weight", torch.ones(3, 64).to(torch.float8_e4m3fn), "with shape [3, 64]"),
        ("weight", torch.ones(64, 64).to(torch.float8_e5m2), "is stored whole, but"),
        ("weight", None, "has no tensor 'model.layers.0.self_attn.q_proj.weight'"),
    ],
)
def test_damaged_weights_are_refused_in_a_sentence(
    checkpoint: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, sentence: str
) -> None:
    folder = damaged(checkpoint, tmp_path, replaced(f"{PROJECTION}.{name}", tensor))
    with pytest.raises(ModelError) as caught:
        load_model(folder, ops=ReferenceOps(), dtype=torch.float32, device="cpu")
    assert sentence in str(caught.value)


def test_a_quantized_tensor_that_no_config_speaks_of_is_not_taken_for_whole(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = damaged(checkpoint, tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"as F8_E4M3, a quantized tensor, where whole ones are"):
        load_model(folder, ops=ReferenceOps(), dtype=torch.float32, device="cpu")


def test_an_embedding_cannot_be_quantized(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    with pytest.raises(ModelError, match=f"holds {name} as F8_E4M3"):
        load_model(
            damaged(checkpoint, tmp_path, change),
            ops=ReferenceOps(),
            dtype=torch.float32,
            device="cpu",
        )


@pytest.mark.parametrize("name", ["fp8: blocks", "compressed-tensors: blocks, groups"])
def test_ranks_that_would_cut_a_block_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, FORMS[name])
    shard = Shard(0, 4, lambda partial: partial)
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path, ops=ReferenceOps(), dtype=torch.float32, device="cpu", shard=shard)
    assert str(caught.value) == (
        "tensor_parallel cuts the 96 inputs of model.layers.0.mlp.down_proj inside of a block of "
        "16 that share a scale; use a smaller tensor_parallel."
    )


def test_a_file_of_model_optimizer_is_found_without_a_word_in_config_json(tmp_path: Path) -> None:
    beside: Mapping[str, Any] = {"quantization": {"quant_algo": "W4A8_AWQ"}}
    write(tmp_path, Form({}, others=lambda name, layer: None, beside=beside))
    with pytest.raises(ModelError, match=r"hf_quant_config.json.quantization.quant_algo is 'W4A8"):
        load_spec(tmp_path)
