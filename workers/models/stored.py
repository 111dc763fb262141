"""Linears and tables of a decoder whose weights stay in the form they are stored in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from outrider.kernels.quantized import QuantizedWeight
from outrider.kernels.stored import (
    KINDS,
    Packed,
    StoredKernels,
    StoredTable,
    StoredWeight,
    can_be_bytes,
)
from outrider.kernels.types import Linear
from outrider.workers.models.source import StoredPart, StoredSource, WeightKeeper


@dataclass(frozen=True, slots=True)
class Wanted:
    """A weight by its name and shape in the checkpoint, and a rank's share of it."""

    name: str
    shape: tuple[int, int]
    rows: range | None = None
    columns: range | None = None


@dataclass(frozen=True, slots=True)
class StoredParts:
    """Each is None where a weight is not stored in a form the kernels take; it is then to be read
    as float32."""

    kernels: StoredKernels
    source: StoredSource
    keeper: WeightKeeper | None = None

    def linear(self, wanted: Sequence[Wanted], bias: Tensor | None) -> Linear | None:
        """Of weights that stand below each other."""
        found: list[StoredPart] = []
        for one in wanted:
            part = self._find(one)
            if part is None:
                return None
            found.append(part)
        packed: list[Packed] = []
        for kind, parts in groupby(found, lambda part: part.kind):
            packed.append(self._packed(f"{wanted[0].name} {len(packed)}", kind, list(parts)))
        return self.kernels.linear(packed, bias)

    def takes_bytes(self, quantization: str, shape: tuple[int, int]) -> bool:
        return quantization == "int8" and can_be_bytes(shape) and self.kernels.gains_by("INT8")

    def gains_by_bytes(self, wanted: Sequence[Wanted], shape: tuple[int, int]) -> bool:
        """Whether what is read as `shape` would be smaller in int8 than it is stored."""
        parts = [self._find(one) for one in wanted]
        is_wide = all(part is None or KINDS[part.kind].block_len == 1 for part in parts)
        return is_wide and self.takes_bytes("int8", shape)

    def linear_of_bytes(
        self,
        name: str,
        shape: tuple[int, int],
        read: Callable[[], QuantizedWeight],
        bias: Tensor | None,
    ) -> Linear:
        """Of a weight that it `takes_bytes` of."""
        packed = self._pack(name, "INT8", shape, lambda: StoredWeight.of_bytes(read()))
        return self.kernels.linear([packed], bias)

    def table_of_bytes(
        self, name: str, shape: tuple[int, int], read: Callable[[], QuantizedWeight]
    ) -> StoredTable:
        packed = self._pack(name, "INT8", shape, lambda: StoredWeight.of_bytes(read()))
        return self.kernels.table(packed)

    def table(self, wanted: Wanted) -> StoredTable | None:
        part = self._find(wanted)
        if part is None:
            return None
        return self.kernels.table(self._packed(wanted.name, part.kind, [part]))

    def _find(self, wanted: Wanted) -> StoredPart | None:
        part = self.source.find(wanted.name, wanted.shape, wanted.rows, wanted.columns)
        return part if part is not None and self.kernels.gains_by(part.kind) else None

    def _packed(self, name: str, kind: str, parts: list[StoredPart]) -> Packed:
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        return self._pack(name, kind, shape, lambda: _below_each_other(parts, kind, shape))

    def _pack(
        self, name: str, kind: str, shape: tuple[int, int], read: Callable[[], StoredWeight]
    ) -> Packed:
        num_values = self.kernels.packed_len(kind, shape)

        def fill(out: Tensor) -> None:
            self.kernels.pack(read(), out)

        if self.keeper is not None:
            return Packed(kind, self.keeper.tensor(f"{kind} {name}", num_values, fill), shape)
        memory = torch.empty(num_values, dtype=torch.float32)
        fill(memory)
        return Packed(kind, memory, shape)


def _below_each_other(parts: list[StoredPart], kind: str, shape: tuple[int, int]) -> StoredWeight:
    return StoredWeight(kind, torch.cat([part.read().blocks for part in parts]), shape)
