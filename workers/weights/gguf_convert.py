"""Converts GGUF files to Hugging Face folders, without torch.

Weights in formats that kernels support stay as stored (`stored_source.py`); where kernels cannot
use them, `SafetensorsSource` dequantises them. Other programs get a folder of float32 only.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from outrider.checkpoints.gguf_header import (
    GgufHeader,
    GgufTensor,
    damaged_gguf,
    read_gguf_header,
)
from outrider.errors import ModelError
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.dequantised import STORED_KINDS, gguf_package
from outrider.workers.weights.gguf_config import INTERLEAVED, ROPE_DIVISORS, hf_config, hf_name
from outrider.workers.weights.safetensors_files import INDEX_FILE, STORED_INDEX_FILE

logger = logging.getLogger(__name__)

QUANTISATIONS = ("F32", *STORED_KINDS)
MAX_FILE_BYTES = 1 << 30

Array = np.ndarray[Any, Any]


def convert(path: Path, folder: Path, *, whole: bool = False) -> None:
    """Convert into an existing folder; `whole` writes float32 only."""
    gguf = gguf_package(path)
    header = read_gguf_header(path)
    tensors = {tensor.name: tensor for tensor in _placed(path, header, gguf)}
    divisors = tensors.pop(ROPE_DIVISORS, None)
    fields = header.fields | {"num_tokens": header.array_lens.get("tokenizer.ggml.tokens", 0)}
    values = None if divisors is None else divisors.values().tolist()
    config = hf_config(fields, set(tensors), values)
    ModelSpec.from_hf(config)  # reject unsupported models before the long work
    writer, stored = _ShardWriter(folder, "model"), _ShardWriter(folder, "stored")
    kinds: dict[str, str] = {}
    for name, tensor in tensors.items():
        target = hf_name(name)
        if target is None:
            logger.warning("%s: tensor %s is not used", path.name, name)
        elif not whole and tensor.kind in STORED_KINDS and len(tensor.shape) == 2:
            stored.add(target, _in_hf_order(target, tensor.blocks(), config))
            kinds[target] = tensor.kind
        else:
            writer.add(target, _in_hf_order(target, tensor.values(), config))
    writer.finish(INDEX_FILE, {"metadata": {"format": "pt"}})
    if kinds:
        stored.finish(STORED_INDEX_FILE, {"kinds": kinds})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the file; its bytes are memory-mapped."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    order: str
    raw: Array  # uint8

    def blocks(self) -> Array:
        """The bytes of each row."""
        self._check_kind()
        return np.array(self.raw.reshape(self._rows_of_bytes))

    def values(self) -> Array:
        self._check_kind()
        if self.kind == "F32":
            return self.raw.view(f"{self.order}f4").reshape(self.shape).astype(np.float32)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(
                self.raw.reshape(self._rows_of_bytes), GGMLQuantizationType[self.kind]
            )
        except Exception as error:
            raise damaged_gguf(self.path, error) from None
        return values.reshape(self.shape).astype(np.float32)

    @property
    def _rows_of_bytes(self) -> tuple[int, int]:
        rows = math.prod(self.shape[:-1])
        return rows, len(self.raw) // max(rows, 1)

    def _check_kind(self) -> None:
        if self.kind not in QUANTISATIONS:
            raise ModelError(
                f"{self.path} stores {self.name} as {self.kind}, which is not supported; "
                f"known are {', '.join(QUANTISATIONS)}."
            )
        if self.kind != "F32" and self.order != "<":
            raise ModelError(
                f"{self.path} stores {self.name} as {self.kind} in the byte order of another "
                "machine; convert the model again on this one."
            )


def _placed(path: Path, header: GgufHeader, gguf: Any) -> list[_Tensor]:
    """All tensors of the file, checked not to overlap."""
    data = np.asarray(np.memmap(path, mode="r"))[header.data_start :]
    tensors, end = {}, 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        where = f"tensor {tensor.name} at offset {tensor.offset}"
        if tensor.offset % header.alignment:
            raise damaged_gguf(path, f"{where} is not aligned")
        if tensor.offset < end:
            raise damaged_gguf(path, f"{where} begins within another")
        kind, num_bytes = _size(path, tensor, gguf)
        end = tensor.offset + num_bytes
        if end > len(data):
            raise damaged_gguf(path, f"{where} ends beyond the file")
        raw = data[tensor.offset : end]
        tensors[tensor.name] = _Tensor(path, tensor.name, kind, tensor.shape, header.order, raw)
    return [tensors[tensor.name] for tensor in header.tensors]


def _size(path: Path, tensor: GgufTensor, gguf: Any) -> tuple[str, int]:
    """The name of a tensor's quantization type, and its size in bytes."""
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
    except ValueError as error:
        raise damaged_gguf(path, error) from None
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if tensor.shape and tensor.shape[-1] % block_len:
        raise damaged_gguf(
            path, f"rows of tensor {tensor.name} are not whole blocks of {block_len}"
        )
    return kind.name, math.prod(tensor.shape) // block_len * block_bytes


def _in_hf_order(name: str, tensor: Array, config: dict[str, Any]) -> Array:
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
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(tensor.shape)


class _ShardWriter:
    """Writes tensors to files of bounded size, so that a large model need not fit in memory."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._pending: dict[str, Array] = {}
        self._pending_bytes = 0
        self._file_of: dict[str, str] = {}
        self._num_files = 0

    def add(self, name: str, tensor: Array) -> None:
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
