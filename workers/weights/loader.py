"""Loads a model by name into a decoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from outrider.checkpoints.cache import locked
from outrider.kernels.types import Ops
from outrider.progress_stages import stage
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Shard
from outrider.workers.models.source import WeightCache
from outrider.workers.weights.checkpoint import checkpoint_folder, spec_of
from outrider.workers.weights.formats.quantized_source import QuantizedFolder
from outrider.workers.weights.formats.registry import check_agrees, schemes_in
from outrider.workers.weights.packed_cache import PackedWeights, PackedWeightsWriter, packed_path
from outrider.workers.weights.safetensors_source import SafetensorsSource
from outrider.workers.weights.stored_source import StoredFolder

logger = logging.getLogger(__name__)


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
    cache_packed: bool = False,
    keeps_stored_format: bool = False,
    narrow: bool = False,
) -> Decoder:
    """Read this rank's share of the weights of `source`, a bundled name, path or hub id.

    `max_position` overrides the maximum length of the checkpoint; rotary tables are made for it.
    `quantization`, "fp8" or "int8", rounds the layers' weights unless they are stored so. With
    `cache_packed`, weights packed for CPU kernels are cached in a file, or mapped from it. With
    `keeps_stored_format`, weights in formats that such kernels support stay as stored; `narrow`,
    meant for draft models, then rounds weights of more than 8 bits to 8, because reading weights
    dominates a small model.
    """
    folder = checkpoint_folder(source, revision)
    spec = spec_of(folder)
    if max_position is not None:
        spec = spec.with_max_position(max_position)
    weights = SafetensorsSource(folder, dtype, torch.device(device))

    schemes = schemes_in(folder)
    quantized = None
    if schemes is not None:
        check_agrees(schemes, quantization)
        quantization, quantized = None, QuantizedFolder(weights, schemes)
    stored = (
        StoredFolder(folder, weights) if keeps_stored_format and ops.packing is not None else None
    )

    def build(weight_cache: WeightCache | None) -> Decoder:
        with stage(f"reading the weights of {source}"):
            return Decoder(
                spec,
                weights,
                ops,
                shard,
                quantization,
                weight_cache,
                stored,
                quantized,
                narrow=narrow,
            )

    if not cache_packed or ops.packing is None:
        return build(None)
    layout = f"{ops.packing.layout}, {'as stored' if keeps_stored_format else 'float32'}"
    if keeps_stored_format and narrow:
        layout += ", narrow"
    path = packed_path(folder, spec, layout, shard or Shard(), quantization)
    return build(None) if path is None else _with_packed_cache(path, str(source), build)


def _with_packed_cache(
    path: Path, source: str, build: Callable[[WeightCache | None], Decoder]
) -> Decoder:
    with locked(path.with_suffix(".lock"), f"the packing of {source}"):
        try:
            with closing(PackedWeights(path)) as packed:
                return build(packed)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError) as error:
            logger.warning("packing the weights again: %s", error)
        try:
            opened = PackedWeightsWriter(path)
        except OSError as error:
            logger.info("cannot cache packed weights: %s", error)
            return build(None)
        with closing(opened) as writer:
            decoder = build(writer)
            writer.finish()
    return decoder
