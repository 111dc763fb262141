"""Weights in their stored format, from a checkpoint's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.kernels.stored import KINDS, StoredWeight
from outrider.workers.models.source import StoredPart, WeightRequest
from outrider.workers.weights.safetensors_source import SafetensorsSource

_HALVES = ("BF16", "F16")  # also their safetensors names


class StoredFolder:
    """The tensors that a GGUF conversion left as stored, or else 16-bit floats of `weights`."""

    def __init__(self, folder: Path, weights: SafetensorsSource) -> None:
        self._folder = folder
        self._weights = weights
        self._files = weights.forms

    def find(self, request: WeightRequest) -> StoredPart | None:
        share = request.shape, request.own_rows, request.own_columns
        if request.name in self._files.kinds:
            return self._blocks(request.name, *share)
        return self._halves(request.name, *share)

    def _halves(
        self, name: str, shape: tuple[int, int], rows: range, columns: range
    ) -> StoredPart | None:
        stored = self._weights.stored(name)
        kind, own = stored.get_dtype(), (len(rows), len(columns))
        if kind not in _HALVES or tuple(stored.get_shape()) != shape:  # reported when it is read
            return None

        def read() -> StoredWeight:
            values = stored[rows.start : rows.stop, columns.start : columns.stop]
            return StoredWeight(kind, values.contiguous().view(torch.uint8), own)

        return StoredPart(kind, own, read)

    def _blocks(
        self, name: str, shape: tuple[int, int], rows: range, columns: range
    ) -> StoredPart | None:
        kind = self._files.kinds[name]
        form, own = KINDS[kind], (len(rows), len(columns))
        if columns.start % form.block_len or columns.stop % form.block_len:
            return None
        stored = self._files.opened[self._files.file_of[name]].get_slice(name)
        row_bytes = shape[1] // form.block_len * form.block_bytes
        if stored.get_dtype() != "U8" or tuple(stored.get_shape()) != (shape[0], row_bytes):
            raise ModelError(
                f"{self._folder} holds {name} as {kind} in {stored.get_shape()} bytes "
                f"({stored.get_dtype()}), but the "
                f"configuration asks for a weight of {list(shape)}; remove that folder."
            )
        first, last = (
            edge // form.block_len * form.block_bytes for edge in (columns.start, columns.stop)
        )

        def read() -> StoredWeight:
            blocks = stored[rows.start : rows.stop, first:last]
            return StoredWeight(kind, blocks.contiguous(), own)

        return StoredPart(kind, own, read)
