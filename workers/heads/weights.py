"""Locates and opens the weight files of a head, whose layout often differs from a model's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outrider.checkpoints.files import Files
from outrider.checkpoints.resolve import resolve_source
from outrider.errors import ModelError
from outrider.workers.models.source import WeightSource
from outrider.workers.weights.checkpoint import checkpoint_folder
from outrider.workers.weights.pickled_source import PickledSource
from outrider.workers.weights.safetensors_source import SafetensorsSource

# Medusa's file, which may lie beside the target's own weights.
_MEDUSA = "medusa_lm_head"
_PICKLED = "pytorch_model.bin"
_TRAINING = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin")


class HeadWeights(WeightSource, Protocol):
    """A source that also lists its tensors and can read one in a dtype of its own."""

    @property
    def names(self) -> Collection[str]: ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...


def head_folder(source: str | Path, revision: str | None, needed: Files = Files.ALL) -> Path:
    """The folder of a head. From a hub, pickled weights are downloaded only if there are no
    others."""
    folder = checkpoint_folder(source, revision, needed)
    if needed is Files.TEXT or any(folder.glob("*.safetensors")):
        return folder
    return resolve_source(source, revision, Files.PICKLED)


def open_weights(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> HeadWeights:
    device = torch.device(device)
    if (folder / f"{_MEDUSA}.safetensors").is_file():
        return SafetensorsSource(folder, dtype, device, only=f"{_MEDUSA}.safetensors")
    pickled = [
        path.name
        for pattern in ("*.bin", "*.pt")
        for path in sorted(folder.glob(pattern))
        if path.name not in _TRAINING
    ]
    has_safetensors = any(folder.glob("*.safetensors"))
    for name in (f"{_MEDUSA}.pt", _PICKLED):
        if name in pickled and (name != _PICKLED or not has_safetensors):
            return PickledSource(folder / name, dtype, device)
    if has_safetensors:
        return SafetensorsSource(folder, dtype, device)
    if len(pickled) == 1:
        return PickledSource(folder / pickled[0], dtype, device)
    raise ModelError(
        f"{folder} has no model.safetensors, {_PICKLED} or {_MEDUSA}.pt, and not one other file "
        "of weights; get the complete checkpoint again."
    )
