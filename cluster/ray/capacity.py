"""Lower bound on the memory a GPU needs for its share of a model: weights, minimal KV, activations.

Computed from checkpoint sizes alone, without torch, and only if the checkpoint is on this host. A
GPU below the bound can never hold the model.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.sizing import USUAL_TOKENS
from outrider.errors import OutriderError
from outrider.links.rank_messages import Role
from outrider.workers.weights.formats.registry import schemes_in
from outrider.workers.weights.formats.schemes import PACKED_TENSORS, STORED_FP8, LayerSchemes
from outrider.workers.weights.safetensors_files import WHOLE, SafetensorsFiles

logger = logging.getLogger(__name__)

# CUDA context, activations and CUDA graphs, at the least.
PASS_BYTES = 768 * 2**20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GPU_DTYPE = "bfloat16"  # what "auto" is there


def least_gpu_bytes(config: EngineConfig, role: str) -> int | None:
    """For a GPU that holds one rank of that role; None if the checkpoint does not say."""
    is_target = role == Role.TARGET
    part = config.target if is_target else config.draft
    if part.model is None:
        return None
    revision = config.target.revision if is_target else None
    try:
        folder = _local_folder(part.model, revision)
        shape = None if folder is None else _read_shape(folder)
        if folder is None or shape is None:
            return None
        dtype = part.dtype if part.dtype != "auto" else config.target.dtype
        item = _ITEM_BYTES[_GPU_DTYPE if dtype == "auto" else dtype]
        schemes = schemes_in(folder)
        if schemes is None:
            weights = _weight_bytes(folder, shape, item, part.quantization)
        else:
            weights = _quantized_bytes(folder, schemes, item)
    except (OutriderError, OSError, ValueError) as error:
        logger.info("the size of %s is unknown on this host: %s", part.model, error)
        return None
    if weights is None:
        return None
    ranks = part.tensor_parallel
    kv = _least_kv_bytes(config, shape, item, is_target)
    # Ranks share heads, columns and vocabulary evenly.
    used = weights / ranks + kv / ranks + PASS_BYTES
    share = config.cache.gpu_memory_utilization if config.cache.kv_cache_gb is None else 1.0
    return int(used / share)


def _local_folder(model: str, revision: str | None) -> Path | None:
    """Folder of the model's files if they are on this host; downloads nothing."""
    from outrider.checkpoints.resolve import resolve_source

    if "/" in model and not model.startswith((".", "/", "~")) and not Path(model).exists():
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception:  # its own errors, its HTTP library's and the system's
            return None
    path = resolve_source(model, revision)
    return path if path.is_dir() else None


def _read_shape(folder: Path) -> dict[str, Any] | None:
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return shape if isinstance(shape, dict) else None


def _weight_bytes(
    folder: Path, shape: dict[str, Any], item: int, quantization: str | None
) -> int | None:
    stored = sum(each.stat().st_size for each in folder.glob("model*.safetensors"))
    stored_item = _ITEM_BYTES.get(str(shape.get("dtype") or shape.get("torch_dtype")))
    if not stored or stored_item is None:
        return None
    num_weights = stored // stored_item
    if quantization is None:
        return num_weights * item
    # 8-bit layers; embeddings keep their dtype.
    hidden, vocab = int(shape.get("hidden_size", 0)), int(shape.get("vocab_size", 0))
    embeddings = hidden * vocab * (1 if shape.get("tie_word_embeddings") else 2)
    return max(num_weights - embeddings, 0) + min(embeddings, num_weights) * item


def _quantized_bytes(folder: Path, schemes: LayerSchemes, item: int) -> int:
    """Of a quantized checkpoint: its weights as a GPU keeps them, and its whole tensors."""
    files, total = SafetensorsFiles(folder), 0
    for name, file_name in files.file_of.items():
        tensor = files.open(file_name).get_slice(name)
        module, _, suffix = name.rpartition(".")
        count = math.prod(tensor.get_shape())
        if suffix in PACKED_TENSORS or tensor.get_dtype() == STORED_FP8:
            scheme = schemes.of(module, True)
            stored = count * (1 if tensor.get_dtype() == STORED_FP8 else 4)
            total += stored * (1 if scheme is None else scheme.gpu_bytes)
        elif tensor.get_dtype() in WHOLE and "scale" not in suffix:
            total += count * item
    return total


def _least_kv_bytes(
    config: EngineConfig, shape: dict[str, Any], item: int, is_target: bool
) -> float:
    """KV of the longest request if `max_model_len` is set, else of a typical one. Of a fixed
    `kv_cache_gb` the target gets at least half."""
    if is_target and config.cache.kv_cache_gb is not None:
        return config.cache.kv_cache_gb * 2**30 / (1 if config.draft.model is None else 2)
    heads = int(shape.get("num_attention_heads") or 0)
    kv_heads = int(shape.get("num_key_value_heads") or heads)
    size = int(shape.get("head_dim") or (int(shape.get("hidden_size", 0)) // heads if heads else 0))
    layers = int(shape.get("num_hidden_layers") or 0)
    length = config.target.max_model_len or USUAL_TOKENS
    return 2 * layers * kv_heads * size * item * length
