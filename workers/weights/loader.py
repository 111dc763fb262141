"""A model's name to its specification and its decoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from outrider.kernels.types import Ops
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Shard
from outrider.workers.models.spec import ModelSpec, eos_ids
from outrider.workers.weights.files import read_json
from outrider.workers.weights.gguf_convert import converted_folder
from outrider.workers.weights.resolve import resolve_source
from outrider.workers.weights.safetensors_source import SafetensorsSource


def load_spec(source: str | Path, *, revision: str | None = None) -> ModelSpec:
    """Sizes and variants of a model, without reading its weights."""
    return _spec_of(checkpoint_folder(source, revision))


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops,
    shard: Shard | None = None,
    max_position: int | None = None,
    revision: str | None = None,
    quantization: str | None = None,
) -> Decoder:
    """Read this rank's share of the weights of `source`, a bundled name, path or hub id.

    `max_position` serves other lengths than the checkpoint states; rotary tables are made for it.
    `quantization`, "fp8" or "int8", is that of the layers' weights.
    """
    folder = checkpoint_folder(source, revision)
    spec = _spec_of(folder)
    if max_position is not None:
        spec = spec.with_max_position(max_position)
    weights = SafetensorsSource(folder, dtype, torch.device(device))
    return Decoder(spec, weights, ops, shard, quantization)


def check_files(source: str | Path, *, revision: str | None = None) -> None:
    """Raise `ModelError` if files of weights are missing, cut short or damaged at their heads; no
    weight is read."""
    SafetensorsSource(checkpoint_folder(source, revision), torch.float32, torch.device("cpu"))


def checkpoint_folder(source: str | Path, revision: str | None = None) -> Path:
    """The Hugging Face folder behind a name; a GGUF is converted into one first."""
    path = resolve_source(source, revision)
    return converted_folder(path) if path.suffix == ".gguf" and path.is_file() else path


def _spec_of(folder: Path) -> ModelSpec:
    """Generation settings, where given, know all the ids that end a text."""
    spec = ModelSpec.from_hf(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    ending = eos_ids(read_json(generation)) if generation.is_file() else ()
    return dataclasses.replace(spec, eos_ids=ending) if ending else spec
