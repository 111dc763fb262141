"""The bundled pair as other servers load it, and the commands that start those servers."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import VOCAB_SIZE, save_checkpoint
from safetensors.torch import load_file

from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET, resolve_source
from outrider.errors import ModelError
from outrider.loadtest.peers import export as peers
from outrider.workers.weights.checkpoint import converted_folder, load_spec

gguf = pytest.importorskip("gguf")
COMMANDS = Path(peers.__file__).with_name("peers.yaml")
TOLERANCE = {"F32": 0.0, "F16": 2**-11, "Q8_0": 2**-7}  # of the largest weight of a tensor
TOKENS = [f"token{i}" for i in range(VOCAB_SIZE)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small Llama whose tokenizer knows `TOKENS`."""
    folder = tmp_path / "model"
    save_checkpoint(folder, "llama-wide-heads")
    write_vocabulary(folder, {token: i for i, token in enumerate(TOKENS)})
    return folder


@pytest.fixture
def lender(tmp_path: Path) -> Path:
    """A GGUF with a tokenizer of `TOKENS` and no model to speak of."""
    path = tmp_path / "lender.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_vocabulary(folder: Path, vocabulary: dict[str, int]) -> None:
    contents = {"model": {"vocab": vocabulary}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")


def assert_read_back_the_same(path: Path, checkpoint: Path, weights: str) -> None:
    folder = converted_folder(path, whole=True)
    original = load_file(checkpoint / "model.safetensors")
    returned = load_file(folder / "model-00001.safetensors")
    assert returned.keys() == original.keys()
    for name, values in returned.items():
        expected = original[name].float()
        limit = TOLERANCE[weights] * expected.abs().max().item()
        torch.testing.assert_close(values, expected, rtol=0, atol=limit)
    assert dataclasses.replace(load_spec(path), norm_eps=0.0) == dataclasses.replace(
        load_spec(checkpoint), norm_eps=0.0
    )
    assert load_spec(path).norm_eps == pytest.approx(load_spec(checkpoint).norm_eps)


@pytest.mark.model
@pytest.mark.parametrize("weights", peers.WEIGHT_TYPES)
def test_a_model_written_as_gguf_is_read_back_the_same(
    weights: str, checkpoint: Path, lender: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.gguf"
    peers.export_gguf(checkpoint, lender, path, weights)
    assert_read_back_the_same(path, checkpoint, weights)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.1.attn_q.weight"] == weights
    assert kinds["blk.1.attn_norm.weight"] == "F32"


@pytest.mark.slow
@pytest.mark.model
def test_the_bundled_draft_is_written_as_gguf_for_the_bundled_target(tmp_path: Path) -> None:
    path, draft = tmp_path / "draft.gguf", resolve_source(BUNDLED_DRAFT)
    peers.export_gguf(draft, resolve_source(BUNDLED_TARGET), path, "F16")
    assert_read_back_the_same(path, draft, "F16")


@pytest.mark.model
def test_a_gguf_has_the_whole_tokenizer_it_was_lent(
    checkpoint: Path, lender: Path, tmp_path: Path
) -> None:
    peers.export_gguf(checkpoint, lender, tmp_path / "out.gguf")
    lent, written = gguf.GGUFReader(lender), gguf.GGUFReader(tmp_path / "out.gguf")
    names = [name for name in lent.fields if name.startswith("tokenizer.")]
    assert len(names) == 8
    for name in names:
        assert written.fields[name].types == lent.fields[name].types
        assert written.fields[name].contents() == lent.fields[name].contents()


@pytest.mark.model
def test_a_gguf_with_another_vocabulary_is_refused(
    checkpoint: Path, lender: Path, tmp_path: Path
) -> None:
    write_vocabulary(checkpoint, {"other": 5})
    with pytest.raises(ModelError, match="token 5 is 'other' in .* and 'token5' in .*same family"):
        peers.export_gguf(checkpoint, lender, tmp_path / "out.gguf")
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    config["vocab_size"] += 1
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="vocabulary of 321 tokens and .* one of 320"):
        peers.export_gguf(checkpoint, lender, tmp_path / "out.gguf")


@pytest.mark.model
def test_an_exported_folder_loads_as_the_same_model_in_float32(tmp_path: Path) -> None:
    import transformers

    peers.export_folder(BUNDLED_DRAFT, tmp_path / "draft")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert model.dtype == torch.float32
    for name, values in load_file(resolve_source(BUNDLED_DRAFT) / "model.safetensors").items():
        torch.testing.assert_close(model.state_dict()[name], values.float(), rtol=0, atol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "draft")
    asked = [{"role": "user", "content": "Hello"}]
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )


def test_every_command_of_the_servers_can_be_split_and_names_a_port() -> None:
    servers = yaml.safe_load(COMMANDS.read_text("utf-8"))["servers"]
    assert servers
    for name, server in servers.items():
        assert "{port}" in server["url"], name
        parts = shlex.split(server["command"])
        assert any("{port}" in part for part in parts), name
        assert all(isinstance(value, str) for value in server.get("env", {}).values()), name
        if "--speculative-config" in parts:
            speculative = json.loads(parts[parts.index("--speculative-config") + 1])
            assert speculative["num_speculative_tokens"] >= 1
