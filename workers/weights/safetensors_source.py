"""Weights in a Hugging Face folder, or in the folder of a converted GGUF file."""

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
    WHOLE,
    SafetensorsFiles,
    StoredFiles,
    damaged,
)


class SafetensorsSource:
    """Reads slices of tensors on demand; holds open files, never a tensor.

    Weights in GGUF formats are dequantised. With `only`, the folder's other files are ignored.
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
        """`dtype` is for tensors that must keep theirs, such as ids."""
        if name in self.forms.kinds:
            whole = self._dequantised_rows(name, shape, rows or range(shape[0]))
            part = whole if columns is None else whole[:, columns.start : columns.stop]
            return part.to(device=self.device, dtype=dtype or self.dtype, copy=True)
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
            if dtype is None and stored.get_dtype() not in WHOLE:
                raise ModelError(
                    f"{path} holds {name} as {stored.get_dtype()}, a quantized tensor, where whole "
                    "ones are read; take a checkpoint in which it is not quantized."
                )
            cuts = tuple(
                slice(each.start, each.stop) if each is not None else slice(None)
                for each in (rows, columns)
            )
            tensor: Tensor = stored[cuts[: len(shape)]]
        except SafetensorError as error:
            raise damaged(path, error) from None
        # Copy: the slice is in the mapped file, which may be replaced while we run.
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def _dequantised_rows(self, name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        """Whole rows, dequantised to float32."""
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

    def has(self, name: str) -> bool:
        return name in self._files.file_of

    def stored_name(self, name: str) -> str:
        return self._files.stored_name(name)

    def path_of(self, name: str) -> Path:
        return self._files.folder / self._files.file_of[self._files.stored_name(name)]

    def stored(self, name: str) -> Any:
        """A safetensors slice of the whole tensor as stored."""
        return self._files.open(self.path_of(name).name).get_slice(self.stored_name(name))

    def read_stored(self, name: str) -> Tensor:
        """The whole tensor, on the CPU and in the dtype it is stored in."""
        try:
            tensor: Tensor = self._files.open(self.path_of(name).name).get_tensor(
                self.stored_name(name)
            )
        except SafetensorError as error:
            raise damaged(self.path_of(name), error) from None
        return tensor.clone()
