"""Linears and tables of a decoder whose weights keep their stored format."""

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
from outrider.workers.models.source import StoredPart, StoredSource, WeightCache, WeightRequest


@dataclass(frozen=True, slots=True)
class StoredParts:
    """Builds linears and tables; None if the kernels do not support the stored format, and the
    weight must be read as float32."""

    kernels: StoredKernels
    source: StoredSource
    weight_cache: WeightCache | None = None

    def linear(self, requests: Sequence[WeightRequest], bias: Tensor | None) -> Linear | None:
        """Of weights stacked along their rows."""
        found: list[StoredPart] = []
        for request in requests:
            part = self._find(request)
            if part is None:
                return None
            found.append(part)
        packed: list[Packed] = []
        for kind, parts in groupby(found, lambda part: part.kind):
            packed.append(self._packed(f"{requests[0].name} {len(packed)}", kind, list(parts)))
        return self.kernels.linear(packed, bias)

    def supports_int8(self, quantization: str, shape: tuple[int, int]) -> bool:
        return quantization == "int8" and can_be_bytes(shape) and self.kernels.gains_by("INT8")

    def gains_by_int8(self, requests: Sequence[WeightRequest], shape: tuple[int, int]) -> bool:
        """Whether these weights, of `shape` together, are smaller in int8 than as stored."""
        parts = [self._find(request) for request in requests]
        is_wide = all(part is None or KINDS[part.kind].block_len == 1 for part in parts)
        return is_wide and self.supports_int8("int8", shape)

    def linear_of(
        self,
        kind: str,
        name: str,
        shape: tuple[int, int],
        read: Callable[[], StoredWeight],
        bias: Tensor | None,
    ) -> Linear | None:
        """Of a weight whose kind is known without reading it."""
        if not self.kernels.gains_by(kind):
            return None
        return self.kernels.linear([self._pack(name, kind, shape, read)], bias)

    def int8_linear(
        self,
        name: str,
        shape: tuple[int, int],
        read: Callable[[], QuantizedWeight],
        bias: Tensor | None,
    ) -> Linear:
        """Of a weight for which `supports_int8` is true."""
        packed = self._pack(name, "INT8", shape, lambda: StoredWeight.of_bytes(read()))
        return self.kernels.linear([packed], bias)

    def int8_table(
        self, name: str, shape: tuple[int, int], read: Callable[[], QuantizedWeight]
    ) -> StoredTable:
        packed = self._pack(name, "INT8", shape, lambda: StoredWeight.of_bytes(read()))
        return self.kernels.table(packed)

    def table(self, request: WeightRequest) -> StoredTable | None:
        part = self._find(request)
        if part is None:
            return None
        return self.kernels.table(self._packed(request.name, part.kind, [part]))

    def _find(self, request: WeightRequest) -> StoredPart | None:
        part = self.source.find(request)
        return part if part is not None and self.kernels.gains_by(part.kind) else None

    def _packed(self, name: str, kind: str, parts: list[StoredPart]) -> Packed:
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        return self._pack(name, kind, shape, lambda: _stacked(parts, kind, shape))

    def _pack(
        self, name: str, kind: str, shape: tuple[int, int], read: Callable[[], StoredWeight]
    ) -> Packed:
        num_values = self.kernels.packed_len(kind, shape)

        def fill(out: Tensor) -> None:
            self.kernels.pack(read(), out)

        if self.weight_cache is not None:
            return Packed(kind, self.weight_cache.tensor(f"{kind} {name}", num_values, fill), shape)
        memory = torch.empty(num_values, dtype=torch.float32)
        fill(memory)
        return Packed(kind, memory, shape)


def _stacked(parts: list[StoredPart], kind: str, shape: tuple[int, int]) -> StoredWeight:
    return StoredWeight(kind, torch.cat([part.read().blocks for part in parts]), shape)
