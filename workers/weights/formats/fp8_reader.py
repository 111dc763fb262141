"""Weights of fp8 numbers and scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.quantized import ActivationScheme, QuantizedWeight
from outrider.workers.models.source import WeightPart, WeightRequest
from outrider.workers.weights.formats.layer_tensors import LayerTensors
from outrider.workers.weights.formats.schemes import Fp8Scheme, Inputs

WEIGHT, _INPUT_SCALE = "weight", "input_scale"


def read_part(layer: LayerTensors, share: WeightRequest, scheme: Fp8Scheme) -> WeightPart:
    if layer.shape(WEIGHT) != share.shape:
        raise layer.unfit(WEIGHT, share.shape)
    _check_cut(layer.module, share, scheme)
    scales = _scales(layer, share, scheme)
    group_len = scheme.blocks[1] if scheme.blocks is not None else 0

    def read() -> QuantizedWeight:
        source = layer.weights
        values = layer.slice(WEIGHT, share.own_rows, share.own_columns).to(source.device)
        return QuantizedWeight(values, scales.to(source.device), source.dtype, group_len)

    return WeightPart(share.own_shape, read, True, group_len, _activations(layer, scheme))


def _check_cut(module: str, share: WeightRequest, scheme: Fp8Scheme) -> None:
    """Activations are rounded by ranks in the groups of the whole, and weights by their blocks."""
    width = share.shape[1]
    edges = [edge for edge in (share.own_columns.start, share.own_columns.stop) if edge != width]
    for length in (scheme.blocks[1] if scheme.blocks is not None else 1, scheme.group_len or 1):
        if any(edge % length for edge in edges):
            raise ModelError(
                f"tensor_parallel cuts the {width} inputs of {module} inside of a block of "
                f"{length} that share a scale; use a smaller tensor_parallel."
            )


def _scales(layer: LayerTensors, share: WeightRequest, scheme: Fp8Scheme) -> Tensor:
    """float32, one for each row, or for each group of its inputs."""
    (num_outputs, width), rows = share.shape, share.own_rows
    if scheme.blocks is not None:
        high, wide = scheme.blocks
        expected = (math.ceil(num_outputs / high), math.ceil(width / wide))
        found = layer.read_scales(scheme.scale_name, expected)
        own = found[:, share.own_columns.start // wide : math.ceil(share.own_columns.stop / wide)]
        return own[torch.arange(rows.start, rows.stop) // high].contiguous()
    shapes = ((), (1,), (1, 1), (num_outputs,), (num_outputs, 1))
    found = layer.read_scales(scheme.scale_name, *shapes).reshape(-1)
    if found.numel() == 1:
        return found.expand(len(rows)).contiguous()
    return found[rows.start : rows.stop].contiguous()


def _activations(layer: LayerTensors, scheme: Fp8Scheme) -> ActivationScheme | None:
    if scheme.inputs is Inputs.WHOLE:
        return None
    if scheme.inputs is Inputs.DYNAMIC:
        return ActivationScheme(group_len=scheme.group_len)
    scale = layer.read_scales(_INPUT_SCALE, (), (1,)).item()
    if not scale:
        raise layer.zero(_INPUT_SCALE)
    return ActivationScheme(scale=scale)
