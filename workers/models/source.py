"""Protocols of weight sources, as a decoder uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.stored import StoredWeight


class WeightSource(Protocol):
    """Reads tensors by their Hugging Face name, as `dtype` and onto `device`.

    `shape` is that of the whole tensor, checked before reading; `rows` and `columns` slice the
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


class WeightCache(Protocol):
    """A cache of packed float32 tensors by name; a missing one is filled in place, for later
    processes to map."""

    def tensor(self, name: str, num_values: int, fill: Callable[[Tensor], None]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A weight, or a rank's share of it, readable in its stored format."""

    kind: str
    shape: tuple[int, int]
    read: Callable[[], StoredWeight]


class StoredSource(Protocol):
    """Weights in the format a checkpoint stores them, named and sliced as by `WeightSource`."""

    def find(
        self,
        name: str,
        shape: tuple[int, int],
        rows: range | None = None,
        columns: range | None = None,
    ) -> StoredPart | None:
        """None if kernels do not support the format, or the slice cuts through a block."""
        ...
