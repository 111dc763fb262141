"""Where a decoder's weights come from, seen from the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.stored import StoredWeight


class WeightSource(Protocol):
    """Reads tensors by their Hugging Face name, as `dtype` and onto `device`.

    `shape` is the whole tensor's, checked before anything is read; `rows` and `columns` cut the
    first and second dimension, so that a rank reads no more than its share. A missing tensor or
    another shape is a `ModelError`.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor: ...


class WeightKeeper(Protocol):
    """Has tensors of float32 that were made before, by their names; else lets them be made where
    others will find them."""

    def tensor(self, name: str, num_values: int, fill: Callable[[Tensor], None]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A weight, or a rank's share of it, that may be read in the form it is stored in."""

    kind: str
    shape: tuple[int, int]
    read: Callable[[], StoredWeight]


class StoredSource(Protocol):
    """Weights in the form a checkpoint stores them, named and cut as by `WeightSource`."""

    def find(
        self,
        name: str,
        shape: tuple[int, int],
        rows: range | None = None,
        columns: range | None = None,
    ) -> StoredPart | None:
        """None where it is in no form that kernels take, or the cut goes through a block."""
        ...
