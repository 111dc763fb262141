"""What a quantized checkpoint says of its layers, independent of how its config spells it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from outrider.errors import ModelError

STORED_FP8 = "F8_E4M3"  # safetensors' name
PACKED_TENSORS = ("weight_packed", "qweight")  # which hold weights in words of 32 bits
FP8 = "fp8"  # the name of `target.quantization`, too
INT4, INT8 = "int4", "int8 by groups"  # not of `target.quantization`


class Inputs(StrEnum):
    """How the inputs of a layer are rounded before its product."""

    WHOLE = "whole"  # not at all
    DYNAMIC = "dynamic"  # by the largest of a token, or of a group of its inputs
    STATIC = "static"  # by a scale in the checkpoint


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """A weight of e4m3 numbers times scales: one for all, one for each output, or `blocks` of
    outputs by inputs that share one."""

    inputs: Inputs
    scale_name: str = "weight_scale"
    blocks: tuple[int, int] | None = None
    group_len: int = 0  # inputs that are rounded together; 0: all of a token

    @property
    def gpu_bytes(self) -> int:
        """Of a stored byte in the memory of a GPU, where blocks are dequantized to 16 bits."""
        return 1 if self.blocks is None else 2


class WordLayout(StrEnum):
    """How whole numbers are packed into words of 32 bits, and which tensors hold them."""

    COMPRESSED = "compressed"  # along the inputs, less a bias
    AWQ = "awq"  # along the outputs, eight in an order of their own
    GPTQ = "gptq"  # along the inputs; zero points are stored less 1
    GPTQ_V2 = "gptq_v2"  # with zero points as they are


@dataclass(frozen=True, slots=True)
class IntScheme:
    """A weight of whole numbers less a zero point, times a scale, for groups of inputs."""

    layout: WordLayout
    bits: int
    group_len: int = 0  # 0: all inputs of an output
    is_symmetric: bool = True  # the zero point is in the middle, and not stored (COMPRESSED)

    @property
    def gpu_bytes(self) -> int:
        """Of a stored byte in the memory of a GPU, where groups are dequantized to 16 bits and
        others have 8."""
        return (16 if self.group_len else 8) // self.bits


Scheme = Fp8Scheme | IntScheme


class LayerSchemes(Protocol):
    """The schemes of a checkpoint's linear layers."""

    @property
    def method(self) -> str:
        """As `quant_method` names it."""
        ...

    @property
    def kind(self) -> str:
        """The type of its weights, as in `target.quantization`."""
        ...

    def of(self, module: str, is_quantized: bool) -> Scheme | None:
        """Of a layer by its name; None for one with whole weights. `is_quantized` is what its
        tensors say; a contradiction is a `ModelError`."""
        ...


@dataclass(frozen=True, slots=True)
class OneScheme:
    """The same scheme for every layer whose weight is stored so. Readers differ in what they make
    of the exceptions that such configs list; the tensors leave no doubt."""

    method: str
    scheme: Scheme

    @property
    def kind(self) -> str:
        return kind_of(self.scheme)

    def of(self, module: str, is_quantized: bool) -> Scheme | None:
        return self.scheme if is_quantized else None


def contradiction(module: str, is_quantized: bool) -> ModelError:
    stored, said = ("quantized", "whole") if is_quantized else ("whole", "quantized")
    return ModelError(
        f"the weight of {module} is stored {stored}, but quantization_config says that it is "
        f"{said}; config.json and weights do not belong together."
    )


def kind_of(scheme: Scheme) -> str:
    if isinstance(scheme, Fp8Scheme):
        return FP8
    return INT4 if scheme.bits == 4 else INT8
