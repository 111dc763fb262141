"""Weights in a Hugging Face folder, or in one that a GGUF file was converted into."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.stored import KINDS
from outrider.workers.weights.dequantised import dequantised
from outrider.workers.weights.safetensors_files import (
    READING,
    SafetensorsFiles,
    StoredFiles,
    damaged,
)


class SafetensorsSource:
    """Reads slices of tensors as they are asked for; holds open files, never a tensor.

    What a GGUF file stores in a form of its own comes as the floats that it stands for. With
    `only`, the folder's other files are somebody else's.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, only: str | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._files = SafetensorsFiles(folder, only, READING)
        self.forms = StoredFiles(folder if only is None else None, READING)

    @property
    def names(self) -> Collection[str]:
        """As they are stored."""
        return self._files.file_of.keys() | self.forms.file_of.keys()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`dtype` is for what must keep its own, such as ids."""
        tensor: Tensor
        if name in self.forms.kinds:
            tensor = self._undone(name, shape, range(shape[0]) if rows is None else rows)
            if columns is not None:
                tensor = tensor[:, columns.start : columns.stop].contiguous()
            return tensor.to(device=self.device, dtype=dtype or self.dtype)
        stored_name = self._files.stored_name(name)
        path = self._files.folder / self._files.file_of[stored_name]
        try:
            stored = self._files.open(path.name).get_slice(stored_name)
            found = tuple(stored.get_shape())
            if found != shape:
                raise ModelError(
                    f"{path} holds {name} with shape {list(found)}, but the "
                    f"configuration asks for {list(shape)}; config.json and weights do not belong "
                    "together."
                )
            cuts = tuple(
                slice(part.start, part.stop) if part is not None else slice(None)
                for part in (rows, columns)
            )
            tensor = stored[cuts[: len(shape)]]
        except SafetensorError as error:
            raise damaged(path, error) from None
        # What was sliced lies in the mapped file, which somebody may replace while we run.
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def _undone(self, name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        """Whole rows as float32."""
        path = self._files.folder / self.forms.file_of[name]
        kind = self.forms.kinds[name]
        stored = self.forms.opened[path.name].get_slice(name)
        num_rows, row_bytes = stored.get_shape()
        form = KINDS[kind]
        found = [num_rows, row_bytes // form.block_bytes * form.block_len]
        if stored.get_dtype() != "U8" or found != list(shape) or row_bytes % form.block_bytes:
            raise ModelError(
                f"{path} holds {name} as {kind} of {found}, but the configuration asks for "
                f"{list(shape)}; remove {path.parent}."
            )
        try:
            blocks = stored[rows.start : rows.stop]
        except SafetensorError as error:
            raise damaged(path, error) from None
        return dequantised(kind, blocks, self._files.folder)

    def stored(self, name: str) -> Any:
        """The whole tensor as it lies in its file: `get_dtype`, `get_shape` and slices of it."""
        stored_name = self._files.stored_name(name)
        return self._files.open(self._files.file_of[stored_name]).get_slice(stored_name)
