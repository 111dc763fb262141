"""Exports the bundled model pair in the formats of other servers.

    python -m outrider.loadtest.peers.export build/peers/models

    target/, draft/             Hugging Face folders in float32, for vLLM, SGLang and transformers
    target.gguf, draft.gguf     for llama.cpp; the target's is the bundled file itself, in 4 bits
    target-f32.gguf             the same weights in float32, as all other servers compute them

`peers.yaml` has the commands that serve them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoints.files import read_json
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET, resolve_source
from outrider.errors import ModelError, OutriderError
from outrider.workers.weights.checkpoint import whole_folder
from outrider.workers.weights.gguf_config import INTERLEAVED, hf_name

TARGET, DRAFT = "target", "draft"
WEIGHT_TYPES = ("F32", "F16", "Q8_0")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
app = typer.Typer(add_completion=False)


def export_folder(source: str, folder: Path) -> None:
    """Write the model named `source` in float32, with the tokenizer both bundled models use."""
    checkpoint, tokens = whole_folder(source), resolve_source(BUNDLED_DRAFT)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(checkpoint.glob("*.safetensors")):
        whole = {name: tensor.float() for name, tensor in load_file(path).items()}
        save_file(whole, folder / path.name, metadata={"format": "pt"})
    for path in checkpoint.glob("*.index.json"):
        shutil.copy(path, folder)
    # Servers choose the model class by `architectures`, which a converted checkpoint lacks.
    config = read_json(checkpoint / "config.json") | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokens / name, folder)


def export_gguf(checkpoint: Path, vocabulary: Path, path: Path, weights: str = "F16") -> None:
    """Write the Llama model in `checkpoint` as GGUF, with the tokenizer of another GGUF.

    `weights`, one of `WEIGHT_TYPES`, is the type of the matrices; norms stay in float32.
    """
    from gguf import GGUFReader, GGUFWriter

    if weights not in WEIGHT_TYPES:
        raise ModelError(f"weights is {weights!r}; choose from {', '.join(WEIGHT_TYPES)}.")
    config, reader = read_json(checkpoint / "config.json"), GGUFReader(vocabulary)
    _check_vocabulary(checkpoint, config, reader, vocabulary)
    tensors: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    writer = GGUFWriter(path, "llama")
    _write_header(writer, config)
    _copy_tokenizer(writer, reader)
    for name, values in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        _write_tensor(writer, name, values, config, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check_vocabulary(
    checkpoint: Path, config: dict[str, Any], reader: Any, vocabulary: Path
) -> None:
    """llama.cpp exchanges drafts as token ids, so both vocabularies must be identical."""
    gguf_tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    tokenizer = read_json(checkpoint / "tokenizer.json")
    own = dict(tokenizer["model"]["vocab"])
    own |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    if config["vocab_size"] != len(gguf_tokens):
        raise ModelError(
            f"{checkpoint} has a vocabulary of {config['vocab_size']} tokens and {vocabulary} one "
            f"of {len(gguf_tokens)}; use models of the same family."
        )
    for token, token_id in own.items():
        if gguf_tokens[token_id] != token:
            raise ModelError(
                f"token {token_id} is {token!r} in {checkpoint} and {gguf_tokens[token_id]!r} in "
                f"{vocabulary}; use models of the same family."
            )


def _write_header(writer: Any, config: dict[str, Any]) -> None:
    if config["model_type"] != "llama" or config["rope_parameters"]["rope_type"] != "default":
        raise ModelError(
            f"model_type is {config['model_type']!r} with rope_parameters "
            f"{config['rope_parameters']}; only a Llama with plain rotary embeddings is written."
        )
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _copy_tokenizer(writer: Any, reader: Any) -> None:
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kinds = [*field.types, None]
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[1])


def _write_tensor(
    writer: Any, name: str, values: Tensor, config: dict[str, Any], weights: str
) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    values = _interleaved(name, values.float(), config)
    kind = GGMLQuantizationType[weights if values.ndim > 1 else "F32"]
    writer.add_tensor(_gguf_name(name), quantize(values.numpy(), kind), raw_dtype=kind)


def _interleaved(name: str, values: Tensor, config: dict[str, Any]) -> Tensor:
    """Query and key rows in the order of llama.cpp's rotary layout, head by head."""
    module = name.rsplit(".", 2)[-2]
    if config["model_type"] not in INTERLEAVED or module not in _HEADS:
        return values
    heads = config[_HEADS[module]]
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape).contiguous()


def _gguf_name(name: str) -> str:
    """The inverse of `hf_name`."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    layers = 1 + int(name.split(".")[2]) if name.startswith("model.layers.") else 1
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None or hf_name(found) != name:
        raise ModelError(f"tensor {name} has no place in a GGUF file of a Llama.")
    return found


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where the models go.")],
    draft_weights: Annotated[
        str, typer.Option(help=f"Of the draft's GGUF: {', '.join(WEIGHT_TYPES)}.")
    ] = "F16",
) -> None:
    """Write the bundled pair as Hugging Face folders and as GGUF files."""
    try:
        bundled = resolve_source(BUNDLED_TARGET)
        export_folder(BUNDLED_TARGET, folder / TARGET)
        export_folder(BUNDLED_DRAFT, folder / DRAFT)
        link = folder / f"{TARGET}.gguf"
        link.unlink(missing_ok=True)
        link.symlink_to(bundled)
        export_gguf(folder / TARGET, bundled, folder / f"{TARGET}-f32.gguf", "F32")
        export_gguf(folder / DRAFT, bundled, folder / f"{DRAFT}.gguf", draft_weights)
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    typer.echo(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    app()
