"""Weights in a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import ModelError
from outrider.workers.weights.files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsSource:
    """Reads slices of tensors as they are asked for; holds open files, never a tensor.

    With `only`, the folder's other files are somebody else's.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, only: str | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._only = only
        self._files: dict[str, Any] = {}
        self._file_of = self._index()

    @property
    def names(self) -> Collection[str]:
        """As they are stored."""
        return self._file_of.keys()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`dtype` is for what must keep its own, such as ids."""
        stored_name = self._stored_name(name)
        file_name = self._file_of[stored_name]
        try:
            stored = self._open(file_name).get_slice(stored_name)
            found = tuple(stored.get_shape())
            if found != shape:
                raise ModelError(
                    f"{self._folder / file_name} holds {name} with shape {list(found)}, but the "
                    f"configuration asks for {list(shape)}; config.json and weights do not belong "
                    "together."
                )
            cuts = tuple(
                slice(part.start, part.stop) if part is not None else slice(None)
                for part in (rows, columns)
            )
            tensor: Tensor = stored[cuts[: len(shape)]]
        except SafetensorError as error:
            raise _damaged(self._folder / file_name, error) from None
        # What was sliced lies in the mapped file, which somebody may replace while we run.
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def stored(self, name: str) -> Any:
        """The whole tensor as it lies in its file: `get_dtype`, `get_shape` and slices of it."""
        stored_name = self._stored_name(name)
        return self._open(self._file_of[stored_name]).get_slice(stored_name)

    def _stored_name(self, name: str) -> str:
        """Checkpoints saved from the bare model have no `model.` before their names."""
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self._file_of:
                return candidate
        raise ModelError(
            f"{self._folder} has no tensor {name!r}; get the complete checkpoint again."
        )

    def _index(self) -> Mapping[str, str]:
        if self._only is not None:
            return dict.fromkeys(self._open(self._only).keys(), self._only)
        if (self._folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        if (self._folder / INDEX_FILE).is_file():
            return self._read_index()
        others = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if len(others) == 1:
            return dict.fromkeys(self._open(others[0]).keys(), others[0])
        raise ModelError(
            f"{self._folder} has no {SINGLE_FILE} and no {INDEX_FILE}; "
            "save the model with save_pretrained(..., safe_serialization=True)."
        )

    def _read_index(self) -> Mapping[str, str]:
        path = self._folder / INDEX_FILE
        file_of = read_json(path).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise ModelError(f"{path} has no weight_map; get the complete checkpoint again.")
        for file_name in sorted(set(file_of.values())):
            present = set(self._open(file_name).keys())
            for name, holder in file_of.items():
                if holder == file_name and name not in present:
                    raise ModelError(
                        f"{self._folder / file_name} has no tensor {name!r}, which {INDEX_FILE} "
                        "says it holds; get the complete checkpoint again."
                    )
        return file_of

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self._folder / file_name
            if Path(file_name).name != file_name:
                raise ModelError(f"{INDEX_FILE} names {file_name!r}, which is not in its folder.")
            self._files[file_name] = open_safetensors(path)
        return self._files[file_name]


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; get the complete checkpoint again.") from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} is damaged or incomplete ({error}); download it again.")
