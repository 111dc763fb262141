"""The files of a head's weights, in which many of them come otherwise than models do."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.workers.models.source import WeightSource
from outrider.workers.weights.checkpoint import checkpoint_folder
from outrider.workers.weights.files import Files
from outrider.workers.weights.pickled_source import PickledSource
from outrider.workers.weights.resolve import resolve_source
from outrider.workers.weights.safetensors_source import SafetensorsSource

# Medusa's, which may lie beside the target's own weights.
_MEDUSA = "medusa_lm_head"
_PICKLED = "pytorch_model.bin"
_TRAINING = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin")


class HeadWeights(WeightSource, Protocol):
    """With the names of what is there, and what must keep a dtype of its own."""

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


def head_folder(source: str | Path, revision: str | None, wanted: Files = Files.ALL) -> Path:
    """The folder behind a head's name. From a hub, pickled weights come only where there are no
    others."""
    folder = checkpoint_folder(source, revision, wanted)
    if wanted is Files.TEXT or any(folder.glob("*.safetensors")):
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
