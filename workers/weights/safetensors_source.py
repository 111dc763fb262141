"""Weights in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.errors import ModelError
from outrider.workers.weights.safetensors_files import READING, SafetensorsFiles, damaged


class SafetensorsSource:
    """Reads slices of tensors as they are asked for; holds open files, never a tensor.

    With `only`, the folder's other files are somebody else's.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, only: str | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._files = SafetensorsFiles(folder, only, READING)

    @property
    def names(self) -> Collection[str]:
        """As they are stored."""
        return self._files.file_of.keys()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`dtype` is for what must keep its own, such as ids."""
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
            tensor: Tensor = stored[cuts[: len(shape)]]
        except SafetensorError as error:
            raise damaged(path, error) from None
        # What was sliced lies in the mapped file, which somebody may replace while we run.
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def stored(self, name: str) -> Any:
        """The whole tensor as it lies in its file: `get_dtype`, `get_shape` and slices of it."""
        stored_name = self._files.stored_name(name)
        return self._files.open(self._files.file_of[stored_name]).get_slice(stored_name)
