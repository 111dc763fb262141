"""Protocols of weight sources, as a decoder uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.quantized import ActivationScheme, QuantizedWeight
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
class WeightRequest:
    """A weight by its name and shape in the checkpoint, and a rank's share of it."""

    name: str
    shape: tuple[int, int]
    rows: range | None = None
    columns: range | None = None

    @property
    def own_rows(self) -> range:
        return range(self.shape[0]) if self.rows is None else self.rows

    @property
    def own_columns(self) -> range:
        return range(self.shape[1]) if self.columns is None else self.columns

    @property
    def own_shape(self) -> tuple[int, int]:
        return len(self.own_rows), len(self.own_columns)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A weight, or a rank's share of it, that may be quantized in the checkpoint."""

    shape: tuple[int, int]
    read: Callable[[], Tensor | QuantizedWeight]
    is_quantized: bool = False
    group_len: int = 0  # of the quantized weight
    activations: ActivationScheme | None = None
    stored_kind: str | None = (
        None  # of blocks that hold just the same, in `outrider.kernels.stored`
    )

    @property
    def format(self) -> tuple[object, ...]:
        """Weights for which it is equal may be stacked."""
        return self.is_quantized, self.group_len, self.activations, self.stored_kind


class QuantizedSource(Protocol):
    """The weights of a quantized checkpoint."""

    @property
    def kind(self) -> str:
        """As in `target.quantization`."""
        ...

    def find(self, request: WeightRequest) -> WeightPart | None:
        """None if this weight is whole. A slice that cuts through a block is a `ModelError`."""
        ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A weight, or a rank's share of it, readable in its stored format."""

    kind: str
    shape: tuple[int, int]
    read: Callable[[], StoredWeight]


class StoredSource(Protocol):
    """Weights in the format a checkpoint stores them."""

    def find(self, request: WeightRequest) -> StoredPart | None:
        """None if kernels do not support the format, or the slice cuts through a block."""
        ...
