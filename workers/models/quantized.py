"""Linears of a decoder whose weights the checkpoint stores quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from outrider.kernels.quantized import QuantizedWeight
from outrider.kernels.types import Linear, Ops
from outrider.workers.models.source import (
    QuantizedSource,
    WeightPart,
    WeightRequest,
    WeightSource,
)

MakeLinear = Callable[
    [str, tuple[int, int], Callable[[], Tensor | QuantizedWeight], Tensor | None, str | None],
    Linear,
]
"""Of a name, a shape, a function that reads the weight, a bias and a `WeightPart.stored_kind`."""


@dataclass(frozen=True, slots=True)
class QuantizedLinears:
    """Weights that are not quantized come from `whole`."""

    whole: WeightSource
    quantized: QuantizedSource
    ops: Ops
    make: MakeLinear

    def linear(
        self, name: str, requests: Sequence[WeightRequest], bias: Tensor | None
    ) -> Linear | None:
        """Of weights stacked along their rows; None if none of them is stored quantized. Those of
        one format are one product."""
        found = [self.quantized.find(request) for request in requests]
        if not any(found):
            return None
        parts = [part or self._whole(r) for part, r in zip(found, requests, strict=True)]
        linears: list[Linear] = []
        first = 0
        for _, group in groupby(parts, lambda part: part.format):
            alike = list(group)
            shape = (sum(part.shape[0] for part in alike), alike[0].shape[1])
            own_bias = None if bias is None else bias[first : first + shape[0]]
            first += shape[0]
            own_name = f"{name} {len(linears)}" if linears else name
            linear = self.make(
                own_name, shape, partial(_stacked, alike), own_bias, alike[0].stored_kind
            )
            scheme = alike[0].activations
            linears.append(linear if scheme is None else self.ops.with_activations(linear, scheme))
        return linears[0] if len(linears) == 1 else self.ops.stacked(linears)

    def _whole(self, request: WeightRequest) -> WeightPart:
        read = partial(self.whole.read, request.name, request.shape, request.rows, request.columns)
        return WeightPart(request.own_shape, read)


def _stacked(parts: Sequence[WeightPart]) -> Tensor | QuantizedWeight:
    """Weights of one format, along their rows."""
    weights = [part.read() for part in parts]
    if len(weights) == 1:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    first = quantized[0]
    scales = torch.cat([weight.scales for weight in quantized])
    if first.values.is_floating_point():  # fp8, which `cat` may not support
        values = torch.cat([weight.values.view(torch.uint8) for weight in quantized])
        return replace(first, values=values.view(first.values.dtype), scales=scales)
    return replace(first, values=torch.cat([w.values for w in quantized]), scales=scales)
