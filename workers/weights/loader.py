"""A model's name to its decoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from outrider.kernels.types import Ops
from outrider.stages import stage
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Shard
from outrider.workers.models.source import WeightKeeper
from outrider.workers.weights.cache import locked
from outrider.workers.weights.checkpoint import checkpoint_folder, spec_of
from outrider.workers.weights.kept import KeptWeights, WeightsWriter, kept_path
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
    keeps: bool = False,
    keeps_form: bool = False,
    narrow: bool = False,
) -> Decoder:
    """Read this rank's share of the weights of `source`, a bundled name, path or hub id.

    `max_position` serves other lengths than the checkpoint states; rotary tables are made for it.
    `quantization`, "fp8" or "int8", is that of the layers' weights. With `keeps`, what kernels of
    CPUs make of them is left for processes that load the same later, and mapped if it is there.
    With `keeps_form`, what such kernels can multiply with as it is stored stays in that form; and
    with `narrow`, meant for models that only guess, weights of more than 8 bits are rounded to 8
    there: reading them is most of what a small model does.
    """
    folder = checkpoint_folder(source, revision)
    spec = spec_of(folder)
    if max_position is not None:
        spec = spec.with_max_position(max_position)
    weights = SafetensorsSource(folder, dtype, torch.device(device))

    stored = StoredFolder(folder, weights) if keeps_form and ops.packing is not None else None

    def build(keeper: WeightKeeper | None) -> Decoder:
        with stage(f"reading the weights of {source}"):
            return Decoder(spec, weights, ops, shard, quantization, keeper, stored, narrow=narrow)

    if not keeps or ops.packing is None:
        return build(None)
    layout = f"{ops.packing.layout}, {'as stored' if keeps_form else 'float32'}"
    if keeps_form and narrow:
        layout += ", narrow"
    path = kept_path(folder, spec, layout, shard or Shard(), quantization)
    return build(None) if path is None else _with_kept(path, str(source), build)


def _with_kept(path: Path, source: str, build: Callable[[WeightKeeper | None], Decoder]) -> Decoder:
    with locked(path.with_suffix(".lock"), f"the packing of {source}"):
        try:
            with closing(KeptWeights(path)) as kept:
                return build(kept)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError) as error:
            logger.warning("weights are packed again: %s", error)
        try:
            opened = WeightsWriter(path)
        except OSError as error:
            logger.info("weights cannot be kept: %s", error)
            return build(None)
        with closing(opened) as writer:
            decoder = build(writer)
            writer.finish()
    return decoder
