"""Weights in the format a checkpoint stores them, for kernels that dequantize while they multiply.

A kind is a block format, as in GGUF: a number of weights in a number of bytes. A rank whose columns
begin or end inside a block cannot use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class StoredKind:
    code: int  # in quant.h
    block_len: int  # weights
    block_bytes: int


KINDS = {
    "Q4_0": StoredKind(0, 32, 18),
    "Q4_1": StoredKind(1, 32, 20),
    "Q5_0": StoredKind(2, 32, 22),
    "Q5_1": StoredKind(3, 32, 24),
    "Q8_0": StoredKind(4, 32, 34),
    "Q4_K": StoredKind(5, 256, 144),
    "Q6_K": StoredKind(6, 256, 210),
    "INT8": StoredKind(7, 32, 32),  # `QuantizedWeight`: bytes, and one scale for each row
    "BF16": StoredKind(8, 1, 2),
    "F16": StoredKind(9, 1, 2),
}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of [out, in]. `scales`, float32 [out], are those of INT8."""

    kind: str
    blocks: Tensor  # uint8 [out, bytes of a row], contiguous
    shape: tuple[int, int]
    scales: Tensor | None = None

    @classmethod
    def of_bytes(cls, weight: QuantizedWeight) -> StoredWeight:
        """From int8 weights that `can_be_bytes`."""
        out_features, in_features = weight.shape
        blocks = weight.values.contiguous().view(torch.uint8)
        return cls("INT8", blocks, (out_features, in_features), weight.scales.contiguous())


def can_be_bytes(shape: tuple[int, int]) -> bool:
    """Whether rows of int8 are whole blocks."""
    return shape[1] % KINDS["INT8"].block_len == 0


@dataclass(frozen=True, slots=True)
class Packed:
    """A stored weight, packed for the kernels; only they read `memory`."""

    kind: str
    memory: Tensor  # float32 [`StoredKernels.packed_len`]; the content is not floats
    shape: tuple[int, int]


class StoredTable(Protocol):
    """Embedding lookup in a stored weight: ids [T] -> float32 [T, in]."""

    @property
    def packed(self) -> Packed: ...

    def __call__(self, ids: Tensor) -> Tensor: ...

    def head(self, num_rows: int) -> Callable[[Tensor], Tensor]:
        """`StoredKernels.linear` with the first `num_rows` rows, or more where they are packed
        together."""
        ...


class StoredKernels(Protocol):
    """Products with stored weights. A weight's value is, bit for bit, the float32 that dequantizing
    gives; the result of a row does not depend on other rows or on threads."""

    def gains_by(self, kind: str) -> bool:
        """Whether products with such weights are faster than with float32: some formats take as
        long to dequantize as float32 takes to read."""
        ...

    def packed_len(self, kind: str, shape: tuple[int, int]) -> int:
        """Size of such a packed weight, in float32 values."""
        ...

    def pack(self, weight: StoredWeight, out: Tensor) -> None: ...

    def linear(self, parts: Sequence[Packed], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """x [T, in] by vertically stacked weights: [T, sum of out]."""
        ...

    def table(self, packed: Packed) -> StoredTable: ...
