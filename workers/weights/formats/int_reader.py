"""Weights of 4 or 8 bits, packed into words, with scales and zero points for groups of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.grouped import BLOCK_LEN
from outrider.kernels.quantized import QuantizedWeight
from outrider.workers.models.source import WeightPart, WeightRequest
from outrider.workers.weights.formats.layer_tensors import LayerTensors
from outrider.workers.weights.formats.schemes import IntScheme, WordLayout

_WORD = 32  # bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs of a word are


@dataclass(frozen=True, slots=True)
class _Groups:
    """Of a whole layer: scales and zero points by output and group, and the group of each input if
    they are not in order."""

    scales: Tensor  # float32 [out, groups]
    zeros: Tensor | None  # int16 [out, groups]; None: in the middle
    order: Tensor | None  # int64 [in]


def read_part(layer: LayerTensors, share: WeightRequest, scheme: IntScheme) -> WeightPart:
    """Where groups are in an order of their own the weight is dequantized here."""
    groups = _READERS[scheme.layout](layer, share.shape, scheme)
    rows = slice(share.own_rows.start, share.own_rows.stop)
    scales, zeros = groups.scales[rows], None if groups.zeros is None else groups.zeros[rows]
    source = layer.weights
    if groups.order is not None:
        order = groups.order[share.own_columns.start : share.own_columns.stop]

        def read_ordered() -> Tensor:
            own_zeros = None if zeros is None else zeros[:, order]
            values = _less_zero(_numbers(layer, share, scheme), own_zeros, 1, scheme)
            return (values * scales[:, order]).to(device=source.device, dtype=source.dtype)

        return WeightPart(share.own_shape, read_ordered)
    own, length = _groups_of(share.own_columns, scheme.group_len or share.shape[1])
    scales, zeros = scales[:, own].contiguous(), None if zeros is None else zeros[:, own]
    group_len = length if len(own) > 1 else 0

    def read() -> QuantizedWeight:
        values = _less_zero(_numbers(layer, share, scheme), zeros, length, scheme)
        own_scales = scales if group_len else scales[:, 0].contiguous()
        moved = values.to(source.device), own_scales.to(source.device)
        return QuantizedWeight(*moved, source.dtype, group_len)

    kind = _block_kind(share, scales, zeros, length, scheme)
    return WeightPart(share.own_shape, read, True, group_len, stored_kind=kind)


def _groups_of(columns: range, group_len: int) -> tuple[Tensor, int]:
    """The groups that these inputs take, and how many inputs take each. Where a rank's inputs begin
    inside of a group, its groups are smaller."""
    first, last = columns.start // group_len, (columns.stop - 1) // group_len
    if first == last:
        return torch.tensor([first]), len(columns)
    length = math.gcd(group_len, columns.start)
    return torch.arange(columns.start, columns.stop, length) // group_len, length


def _block_kind(
    share: WeightRequest, scales: Tensor, zeros: Tensor | None, length: int, scheme: IntScheme
) -> str | None:
    """The GGUF format that holds just these weights, if there is one."""
    width = len(share.own_columns)
    is_whole = width % BLOCK_LEN == 0 and (length % BLOCK_LEN == 0 or length >= width)
    if not is_whole or not torch.equal(scales.half().float(), scales):
        return None
    is_centred = zeros is None or bool((zeros == 1 << (scheme.bits - 1)).all())
    if scheme.bits == 8:
        return "Q8_0" if is_centred else None
    return "Q4_0" if is_centred else "Q5_0"


def _less_zero(numbers: Tensor, zeros: Tensor | None, length: int, scheme: IntScheme) -> Tensor:
    """int8 [rows, columns], or int16 if they might not fit."""
    if zeros is None:
        return (numbers.to(torch.int16) - (1 << (scheme.bits - 1))).to(torch.int8)
    width = numbers.shape[1]
    zeros = zeros.repeat_interleave(length, dim=1)[:, :width]
    values = numbers.to(torch.int16) - zeros
    fits = scheme.bits == 4 or bool((zeros == 128).all())
    return values.to(torch.int8) if fits else values


def _numbers(layer: LayerTensors, share: WeightRequest, scheme: IntScheme) -> Tensor:
    """uint8 [rows, columns], as they are packed."""
    width, bits = share.shape[1], scheme.bits
    columns = slice(share.own_columns.start, share.own_columns.stop)
    if scheme.layout is WordLayout.COMPRESSED:
        words = layer.slice("weight_packed", share.own_rows, range(math.ceil(width * bits / _WORD)))
        return unpacked(words, bits)[:, columns]
    rows = slice(share.own_rows.start, share.own_rows.stop)
    words = layer.weights.read_stored(f"{layer.module}.qweight")
    if scheme.layout is WordLayout.AWQ:
        return _in_order(unpacked(words[columns], bits))[:, rows].t()
    return unpacked(words.t()[rows].contiguous(), bits)[:, columns]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """uint8 of int32 [n, words], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _in_order(numbers: Tensor) -> Tensor:
    """Of AWQ: [n, out], where each word had its outputs in an order of its own."""
    return numbers.view(numbers.shape[0], -1, len(_AWQ_ORDER))[:, :, list(_AWQ_ORDER)].flatten(1)


def _compressed(layer: LayerTensors, shape: tuple[int, int], scheme: IntScheme) -> _Groups:
    num_outputs, width = shape
    words = math.ceil(width * scheme.bits / _WORD)
    layer.check_words("weight_packed", (num_outputs, words))
    if (
        layer.has("weight_shape")
        and tuple(layer.read_indices("weight_shape", (2,)).tolist()) != shape
    ):
        raise ModelError(
            f"weight_shape of {layer.module} is not {list(shape)}, as config.json says; they do "
            "not belong together."
        )
    num_groups = math.ceil(width / scheme.group_len) if scheme.group_len else 1
    scales = layer.read_scales("weight_scale", (num_outputs, num_groups), may_be_negative=True)
    zeros = None
    if not scheme.is_symmetric:
        packed = (math.ceil(num_outputs * scheme.bits / _WORD), num_groups)
        found = unpacked(layer.read_words("weight_zero_point", packed).t(), scheme.bits)
        zeros = found.t()[:num_outputs].to(torch.int16)
    return _Groups(scales, zeros, _order(layer, "weight_g_idx", width, num_groups, scheme))


def _awq(layer: LayerTensors, shape: tuple[int, int], scheme: IntScheme) -> _Groups:
    scales, zeros = _transposed(layer, shape, scheme, (shape[1], shape[0] * scheme.bits // _WORD))
    return _Groups(scales, _in_order(zeros).t().to(torch.int16), None)


def _gptq(layer: LayerTensors, shape: tuple[int, int], scheme: IntScheme) -> _Groups:
    scales, stored = _transposed(layer, shape, scheme, (shape[1] * scheme.bits // _WORD, shape[0]))
    zeros = stored.t().to(torch.int16)
    if scheme.layout is WordLayout.GPTQ:
        zeros = (zeros + 1) & ((1 << scheme.bits) - 1)
    return _Groups(scales, zeros, _order(layer, "g_idx", shape[1], scales.shape[1], scheme))


def _transposed(
    layer: LayerTensors, shape: tuple[int, int], scheme: IntScheme, packed: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Scales [out, groups], and packed zero points, uint8 [groups, out]."""
    num_outputs, width = shape
    for size in shape:
        if size * scheme.bits % _WORD:
            raise ModelError(
                f"a weight of {list(shape)}, {layer.module}, does not fill words of {_WORD} bits; "
                "take a checkpoint that is quantized in another way."
            )
    layer.check_words("qweight", packed)
    num_groups = math.ceil(width / scheme.group_len) if scheme.group_len else 1
    scales = layer.read_scales("scales", (num_groups, num_outputs), may_be_negative=True)
    words = layer.read_words("qzeros", (num_groups, num_outputs * scheme.bits // _WORD))
    return scales.t().contiguous(), unpacked(words, scheme.bits)


def _order(
    layer: LayerTensors, suffix: str, width: int, num_groups: int, scheme: IntScheme
) -> Tensor | None:
    if not layer.has(suffix):
        return None
    order = layer.read_indices(suffix, (width,))
    if order.min() < 0 or order.max() >= num_groups:
        raise ModelError(
            f"{layer.module}.{suffix} names groups that are not among its {num_groups}; get the "
            "complete checkpoint again."
        )
    in_order = torch.arange(width) // (scheme.group_len or width)
    return None if torch.equal(order, in_order) else order


_READERS: Mapping[WordLayout, Callable[[LayerTensors, tuple[int, int], IntScheme], _Groups]] = (
    MappingProxyType(
        {
            WordLayout.COMPRESSED: _compressed,
            WordLayout.AWQ: _awq,
            WordLayout.GPTQ: _gptq,
            WordLayout.GPTQ_V2: _gptq,
        }
    )
)
