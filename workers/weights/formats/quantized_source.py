"""Weights of a quantized checkpoint as they are stored, or a rank's share of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.quantized import ActivationScheme, QuantizedWeight
from outrider.workers.models.source import WeightPart
from outrider.workers.weights.formats.schemes import Fp8Scheme, Inputs, LayerSchemes
from outrider.workers.weights.safetensors_files import damaged
from outrider.workers.weights.safetensors_source import SafetensorsSource

_STORED_FP8 = "F8_E4M3"  # safetensors' name
_WEIGHT, _INPUT_SCALE = "weight", "input_scale"


class QuantizedFolder:
    """See `QuantizedSource`."""

    def __init__(self, weights: SafetensorsSource, schemes: LayerSchemes) -> None:
        self._weights = weights
        self._schemes = schemes

    @property
    def kind(self) -> str:
        return self._schemes.kind

    def find(
        self,
        name: str,
        shape: tuple[int, int],
        rows: range | None = None,
        columns: range | None = None,
    ) -> WeightPart | None:
        stored = self._weights.stored(name)
        module = self._weights.stored_name(name).removesuffix(f".{_WEIGHT}")
        scheme = self._schemes.of(module, stored.get_dtype() == _STORED_FP8)
        if scheme is None:
            return None
        if tuple(stored.get_shape()) != shape:
            raise self._unfit(f"{module}.{_WEIGHT}", stored.get_shape(), list(shape))
        rows, columns = rows or range(shape[0]), columns or range(shape[1])
        self._check_cut(module, shape[1], columns, scheme)
        scales = self._scales(module, shape, rows, columns, scheme)
        group_len = scheme.blocks[1] if scheme.blocks is not None else 0

        def read() -> QuantizedWeight:
            values = self._slice(name, stored, rows, columns)
            device, dtype = self._weights.device, self._weights.dtype
            return QuantizedWeight(values.to(device), scales.to(device), dtype, group_len)

        own = (len(rows), len(columns))
        activations = self._activations(module, scheme)
        return WeightPart(own, read, True, group_len, activations)

    def _slice(self, name: str, stored: Any, rows: range, columns: range) -> Tensor:
        try:
            values: Tensor = stored[rows.start : rows.stop, columns.start : columns.stop]
        except SafetensorError as error:
            raise damaged(self._weights.path_of(name), error) from None
        # Copy: the slice is in the mapped file, which may be replaced while we run.
        return values.clone(memory_format=torch.contiguous_format)

    def _check_cut(self, module: str, width: int, columns: range, scheme: Fp8Scheme) -> None:
        edges = [edge for edge in (columns.start, columns.stop) if edge != width]
        lengths = (scheme.blocks[1] if scheme.blocks is not None else 1, scheme.group_len or 1)
        for length in lengths:
            if any(edge % length for edge in edges):
                raise ModelError(
                    f"tensor_parallel cuts the {width} inputs of {module} inside of a block of "
                    f"{length} that share a scale; use a smaller tensor_parallel."
                )

    def _scales(
        self, module: str, shape: tuple[int, int], rows: range, columns: range, scheme: Fp8Scheme
    ) -> Tensor:
        """float32, one for each row, or for each group of its inputs."""
        name = f"{module}.{scheme.scale_name}"
        found = self._small(name)
        if scheme.blocks is not None:
            high, wide = scheme.blocks
            expected = (math.ceil(shape[0] / high), math.ceil(shape[1] / wide))
            if tuple(found.shape) != expected:
                raise self._unfit(name, found.shape, list(expected))
            own = found[:, columns.start // wide : math.ceil(columns.stop / wide)]
            scales = own[torch.arange(rows.start, rows.stop) // high].contiguous()
        elif found.numel() == 1:
            scales = found.reshape(1).expand(len(rows)).contiguous()
        elif tuple(found.shape) in ((shape[0],), (shape[0], 1)):
            scales = found.reshape(-1)[rows.start : rows.stop].contiguous()
        else:
            raise self._unfit(name, found.shape, [shape[0], 1])
        return scales

    def _activations(self, module: str, scheme: Fp8Scheme) -> ActivationScheme | None:
        if scheme.inputs is Inputs.WHOLE:
            return None
        if scheme.inputs is Inputs.DYNAMIC:
            return ActivationScheme(group_len=scheme.group_len)
        name = f"{module}.{_INPUT_SCALE}"
        found = self._small(name)
        if found.numel() != 1:
            raise self._unfit(name, found.shape, [1])
        if not found.item():
            raise ModelError(f"{self._weights.path_of(name)} holds {name} of 0; download it again.")
        return ActivationScheme(scale=found.item())

    def _small(self, name: str) -> Tensor:
        """A tensor of scales, whole."""
        scales = self._weights.read_stored(name).float()
        if not (torch.isfinite(scales) & (scales >= 0)).all():
            raise ModelError(
                f"{self._weights.path_of(name)} holds {name} with numbers that are no scales: "
                "negative, infinite or NaN; download it again."
            )
        return scales

    def _unfit(self, name: str, found: Any, expected: list[int]) -> ModelError:
        return ModelError(
            f"{self._weights.path_of(name)} holds {name} with shape {list(found)}, but the "
            f"configuration asks for {expected}; config.json and weights do not belong together."
        )
