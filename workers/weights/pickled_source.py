"""Weights written by `torch.save`, read without executing pickled code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ModelError


class PickledSource:
    """A dictionary of tensors in one file, which stays mapped for the lifetime of this object."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._path = path
        self._tensors = _load(path)

    @property
    def names(self) -> Collection[str]:
        """As they are stored."""
        return self._tensors.keys()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As `SafetensorsSource.read`."""
        if name not in self._tensors:
            raise ModelError(f"{self._path} has no tensor {name!r}; get the complete file again.")
        stored = self._tensors[name]
        if tuple(stored.shape) != shape:
            raise ModelError(
                f"{self._path} holds {name} with shape {list(stored.shape)}, but the configuration "
                f"asks for {list(shape)}; config.json and weights do not belong together."
            )
        cuts = tuple(
            slice(part.start, part.stop) if part is not None else slice(None)
            for part in (rows, columns)
        )
        cut = stored[cuts[: len(shape)]]
        return cut.to(device=self.device, dtype=dtype or self.dtype, copy=True)


def _load(path: Path) -> Mapping[str, Tensor]:
    try:
        # Files of old torch versions are not zip archives and cannot be mapped.
        contents = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; get the complete checkpoint again.") from None
    except pickle.UnpicklingError:
        raise ModelError(
            f"{path} holds more than tensors or is damaged, and code that a checkpoint brings "
            "along is never run; take a checkpoint with safetensors files."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from None
    if not isinstance(contents, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in contents.items()
    ):
        raise ModelError(f"{path} holds no dictionary of tensors; get the weights alone.")
    return contents


def _damaged(path: Path, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return ModelError(f"{path} is damaged or incomplete ({reason[0]}); download it again.")
