"""Stored weights by the C kernels; see `outrider.kernels.stored` and quant.h.

A decoder's linears take `Packed` weights in place of float32 tensors. They are packed once, at
load, into memory that may be a mapped file; a captured pass holds their addresses like any other.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from ctypes import addressof
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu import native
from outrider.kernels.cpu.native import CQuantLayer, check
from outrider.kernels.stored import KINDS, Packed, StoredWeight

_PANEL = 16
_PLAIN_PATH = "plain"  # correct, but slower than float32 with the CPU's vector instructions
_NORMED_ROWS = 4096
# As for float32 (`ops.py`): from this work on, the interpreter lock is released.
_RELEASE_LOCK_WORK = 1 << 25


@dataclass(frozen=True, slots=True)
class CpuTable:
    """See `StoredTable`."""

    packed: Packed
    _kernels: CpuStored
    _layer: CQuantLayer

    @property
    def address(self) -> int:
        """Of the C struct, which is also the linear layer of this weight."""
        return addressof(self._layer)

    def __call__(self, ids: Tensor) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.packed.shape[1]), dtype=torch.float32)
        rows = (addressof(self._layer), ids.data_ptr(), ids.numel(), out.data_ptr())
        check(self._kernels.releasing.quant_rows(*rows))
        return out

    def norms(self) -> Tensor | None:
        """Norms of the rows, where they help to find the best token without all scores: see
        best.c."""
        if not self._kernels.holding.quant_has_first(self.address):
            return None
        ids = torch.arange(self.packed.shape[0])
        parts = [ids[i : i + _NORMED_ROWS] for i in range(0, len(ids), _NORMED_ROWS)]
        norms = torch.cat([self(part).norm(dim=-1, dtype=torch.float64) for part in parts])
        return (norms * (1 + 1e-6)).float()

    def head(self, num_rows: int) -> Callable[[Tensor], Tensor]:
        kind, (all_rows, in_features) = self.packed.kind, self.packed.shape
        shape = min(num_rows + -num_rows % _PANEL, all_rows), in_features
        memory = self.packed.memory[: self._kernels.packed_len(kind, shape)]
        return self._kernels.linear([Packed(kind, memory, shape)], None)


@dataclass(frozen=True, slots=True)
class CpuStored:
    """See `StoredKernels`. `empty` allocates results and `record` captures calls."""

    holding: SimpleNamespace
    releasing: SimpleNamespace
    empty: Callable[[tuple[int, ...]], Tensor]
    record: Callable[[int, tuple[int, ...], object], None]

    @property
    def path(self) -> str:
        """The instruction set in use, chosen when the kernels first run."""
        name: bytes = self.holding.quant_path(-1)
        return name.decode()

    def use_path(self, index: int) -> bool:
        """Use the path of this index from now on, 0 being the fastest; False if there is none or it
        does not run here. All give the same bits: for comparisons."""
        return self.holding.quant_path(index) is not None

    def gains_by(self, kind: str) -> bool:
        if kind == "F16":
            # ARM cores widen float16 at a quarter of the rate at which they multiply.
            return platform.machine() not in ("aarch64", "arm64")
        return kind == "BF16" or self.path != _PLAIN_PATH

    def packed_len(self, kind: str, shape: tuple[int, int]) -> int:
        num_bytes: int = self.holding.quant_bytes(KINDS[kind].code, *_checked(kind, shape))
        return num_bytes // torch.float32.itemsize

    def pack(self, weight: StoredWeight, out: Tensor) -> None:
        kind, (out_features, in_features) = KINDS[weight.kind], weight.shape
        expected = (out_features, in_features // kind.block_len * kind.block_bytes)
        blocks = weight.blocks.contiguous()
        if tuple(blocks.shape) != expected or blocks.dtype is not torch.uint8:
            raise ValueError(f"{weight.kind} of {weight.shape} takes {expected} bytes.")
        if out.numel() != self.packed_len(weight.kind, weight.shape):
            raise ValueError(f"{out.numel()} values cannot hold a packed {weight.shape}.")
        scales = weight.scales
        if weight.kind == "INT8" and (scales is None or scales.shape != (out_features,)):
            raise ValueError(f"INT8 of {weight.shape} takes {out_features} scales.")
        self.releasing.quant_pack(
            kind.code,
            blocks.data_ptr(),
            None if scales is None else scales.contiguous().data_ptr(),
            out_features,
            in_features,
            out.data_ptr(),
        )

    def packed(self, weight: StoredWeight) -> Packed:
        """Pack into new memory."""
        memory = torch.empty(self.packed_len(weight.kind, weight.shape), dtype=torch.float32)
        self.pack(weight, memory)
        return Packed(weight.kind, memory, weight.shape)

    def table(self, packed: Packed) -> CpuTable:
        return CpuTable(packed, self, _layer(packed, None, packed.shape[0]))

    def linear(self, parts: Sequence[Packed], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        in_features = parts[0].shape[1]
        out_features = sum(part.shape[0] for part in parts)
        layers, offsets, owned = [], [], []
        first = 0
        for part in parts:
            own = None if bias is None else _padded(bias[first : first + part.shape[0]])
            layers.append(_layer(part, own, out_features))
            offsets.append(first * torch.float32.itemsize)
            owned.append((part.memory, own))
            first += part.shape[0]
        heavy_rows = _RELEASE_LOCK_WORK // (out_features * in_features)
        calls = [(addressof(layer), offset) for layer, offset in zip(layers, offsets, strict=True)]
        memory = (layers, owned)

        def apply(x: Tensor) -> Tensor:
            num_rows, width = x.shape
            if width != in_features:
                raise ValueError(f"A linear layer of {in_features} inputs got {width}.")
            if x.dtype is not torch.float32:
                raise TypeError(f"The C kernels take float32, not {x.dtype}.")
            x = x.contiguous()
            out = self.empty((num_rows, out_features))
            library = self.releasing if num_rows > heavy_rows else self.holding
            for address, offset in calls:
                arguments = (address, x.data_ptr(), num_rows, out.data_ptr() + offset)
                check(library.quant_linear(*arguments))
                self.record(native.QUANT_LINEAR, arguments, (memory, x, out))
            return out

        return apply


def _checked(kind: str, shape: tuple[int, int]) -> tuple[int, int]:
    if shape[1] % KINDS[kind].block_len:
        raise ValueError(f"{kind} has blocks of {KINDS[kind].block_len}, not rows of {shape[1]}.")
    return shape


def _layer(packed: Packed, bias: Tensor | None, out_stride: int) -> CQuantLayer:
    address = None if bias is None else bias.data_ptr()
    return CQuantLayer(
        packed.memory.data_ptr(), address, KINDS[packed.kind].code, *packed.shape, out_stride
    )


def _padded(bias: Tensor) -> Tensor:
    return F.pad(bias.detach().float().contiguous(), (0, -bias.shape[0] % _PANEL))
