"""Weights of a quantized checkpoint as they are stored, or a rank's share of them."""

from __future__ import annotations

from outrider.workers.models.source import WeightPart, WeightRequest
from outrider.workers.weights.formats import fp8_reader, int_reader
from outrider.workers.weights.formats.layer_tensors import LayerTensors
from outrider.workers.weights.formats.schemes import (
    PACKED_TENSORS,
    STORED_FP8,
    Fp8Scheme,
    LayerSchemes,
    Scheme,
    WordLayout,
    contradiction,
)
from outrider.workers.weights.safetensors_source import SafetensorsSource

_WEIGHT = "weight"
_PACKED, _QWEIGHT = PACKED_TENSORS


class QuantizedFolder:
    """See `QuantizedSource`."""

    def __init__(self, weights: SafetensorsSource, schemes: LayerSchemes) -> None:
        self._weights = weights
        self._schemes = schemes

    @property
    def kind(self) -> str:
        return self._schemes.kind

    def find(self, request: WeightRequest) -> WeightPart | None:
        layer, found = self._layer(request.name)
        scheme = self._schemes.of(layer.module, found is not None)
        if scheme is None:
            return None
        if found != _tensor_of(scheme):
            raise contradiction(layer.module, found is not None)
        if isinstance(scheme, Fp8Scheme):
            return fp8_reader.read_part(layer, request, scheme)
        return int_reader.read_part(layer, request, scheme)

    def _layer(self, name: str) -> tuple[LayerTensors, str | None]:
        """The layer, and the tensor that holds its quantized weight, if one does."""
        module = name.removesuffix(f".{_WEIGHT}")
        for stored in (module, module.removeprefix("model.")):
            layer = LayerTensors(self._weights, stored)
            for suffix in PACKED_TENSORS:
                if layer.has(suffix):
                    return layer, suffix
        stored = self._weights.stored_name(name)
        is_fp8 = self._weights.stored(name).get_dtype() == STORED_FP8
        layer = LayerTensors(self._weights, stored.removesuffix(f".{_WEIGHT}"))
        return layer, _WEIGHT if is_fp8 else None


def _tensor_of(scheme: Scheme) -> str:
    if isinstance(scheme, Fp8Scheme):
        return _WEIGHT
    return _PACKED if scheme.layout is WordLayout.COMPRESSED else _QWEIGHT
