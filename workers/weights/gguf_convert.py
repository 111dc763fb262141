"""GGUF files, dequantised into a Hugging Face folder of float32 safetensors.

What kernels can take as it is stored is beside it in that form; see `stored_source.py`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.stored import KINDS
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.gguf_config import INTERLEAVED, ROPE_DIVISORS, hf_config, hf_name
from outrider.workers.weights.gguf_header import check_gguf_header, damaged_gguf
from outrider.workers.weights.safetensors_files import INDEX_FILE, STORED_INDEX_FILE

logger = logging.getLogger(__name__)

QUANTISATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
MAX_FILE_BYTES = 1 << 30


def convert(path: Path, folder: Path) -> None:
    """Into a folder that is there."""
    reader = _open(path)
    fields = _fields(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_places(path, reader)
    divisors = tensors.pop(ROPE_DIVISORS, None)
    config = hf_config(
        fields,
        set(tensors),
        None if divisors is None else _dequantise(path, divisors).tolist(),
    )
    ModelSpec.from_hf(config)  # what cannot be served is refused before the long work
    writer, stored = _ShardWriter(folder, "model"), _ShardWriter(folder, "stored")
    kinds: dict[str, str] = {}
    for name, tensor in tensors.items():
        target = hf_name(name)
        if target is None:
            logger.warning("%s: tensor %s is not used", path.name, name)
            continue
        writer.add(target, _in_hf_order(target, _dequantise(path, tensor), config))
        if tensor.tensor_type.name in KINDS and len(tensor.shape) == 2:
            blocks = torch.from_numpy(tensor.data.copy()).view(torch.uint8)
            stored.add(target, _in_hf_order(target, blocks, config))
            kinds[target] = tensor.tensor_type.name
    writer.finish(INDEX_FILE, {"metadata": {"format": "pt"}})
    stored.finish(STORED_INDEX_FILE, {"kinds": kinds})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            f"reading {path.name} needs the package gguf; install it with: pip install gguf"
        ) from None
    check_gguf_header(path)
    try:
        return GGUFReader(path)
    # A damaged header surfaces as whatever the reader happened to stumble over.
    except Exception as error:
        raise damaged_gguf(path, error) from None


def _check_places(path: Path, reader: Any) -> None:
    """The reader adds offsets in 64 bits and takes whatever bytes are there."""
    end = 0
    places = ((int(tensor.field.parts[-1][0]), tensor) for tensor in reader.tensors)
    for offset, tensor in sorted(places, key=lambda place: place[0]):
        where = f"tensor {tensor.name} at offset {offset}"
        if offset % int(reader.alignment):
            raise damaged_gguf(path, f"{where} is not aligned")
        if offset < end:
            raise damaged_gguf(path, f"{where} begins within another")
        end = offset + tensor.n_bytes
        if reader.data_offset + end > len(reader.data):
            raise damaged_gguf(path, f"{where} ends beyond the file")


def _fields(path: Path, reader: Any) -> dict[str, Any]:
    """The header without the tokenizer's long lists, of which only the length is of use here."""
    try:
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.") or name.endswith("_token_id")
        }
        tokens = reader.fields.get("tokenizer.ggml.tokens")
    except Exception as error:
        raise damaged_gguf(path, error) from None
    return fields | {"num_tokens": len(tokens.data) if tokens is not None else 0}


def _dequantise(path: Path, tensor: Any) -> Tensor:
    from gguf.quants import dequantize

    kind = tensor.tensor_type.name
    if kind not in QUANTISATIONS:
        raise ModelError(
            f"{path} stores {tensor.name} as {kind}, which is not supported; "
            f"known are {', '.join(QUANTISATIONS)}."
        )
    shape = tuple(int(size) for size in reversed(tensor.shape))
    try:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    except Exception as error:
        raise damaged_gguf(path, error) from None
    return torch.from_numpy(values.astype("float32", copy=True))


def _in_hf_order(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Undo the interleaving of each head's rows in query and key projections."""
    heads_key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    module = name.rsplit(".", 2)[-2]
    if config["model_type"] not in INTERLEAVED or module not in heads_key:
        return tensor
    num_heads, head_dim = config[heads_key[module]], config["head_dim"]
    num_dims = 1 if name.endswith(".bias") else 2
    if tensor.ndim != num_dims or tensor.shape[0] != num_heads * head_dim:
        raise ModelError(
            f"{name} has shape {list(tensor.shape)} in the GGUF file, whose header asks for "
            f"{num_heads} heads of {head_dim} rows; convert the model again."
        )
    half = head_dim // 2
    paired = tensor.reshape(num_heads, half, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape).contiguous()


class _ShardWriter:
    """Writes tensors to files of bounded size, so that a large model need not fit in memory."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._file_of: dict[str, str] = {}
        self._num_files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes

    def finish(self, index_file: str, index: dict[str, Any]) -> None:
        if self._pending:
            self._flush()
        text = json.dumps(index | {"weight_map": self._file_of})
        (self._folder / index_file).write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        self._num_files += 1
        file_name = f"{self._prefix}-{self._num_files:05d}.safetensors"
        save_file(self._pending, self._folder / file_name, metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(self._pending, file_name)
        self._pending, self._pending_bytes = {}, 0
