"""What a quantized checkpoint says of its layers, independent of how its config spells it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from outrider.errors import ModelError

FP8 = "fp8"  # the name of `target.quantization`, too


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
        """Of a weight in the memory of a GPU, where blocks are dequantized to 16 bits."""
        return 1 if self.blocks is None else 2


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

    @property
    def gpu_bytes(self) -> int:
        """The most that a scheme takes."""
        ...

    def of(self, module: str, is_quantized: bool) -> Fp8Scheme | None:
        """Of a layer by its name; None for one with whole weights. `is_quantized` is what its
        tensors say; a contradiction is a `ModelError`."""
        ...


@dataclass(frozen=True, slots=True)
class OneScheme:
    """The same scheme for every layer whose weight is stored so. What such configs say of
    exceptions is a matter of taste among readers; the tensors leave no doubt."""

    method: str
    scheme: Fp8Scheme
    kind: str = FP8

    @property
    def gpu_bytes(self) -> int:
        return self.scheme.gpu_bytes

    def of(self, module: str, is_quantized: bool) -> Fp8Scheme | None:
        return self.scheme if is_quantized else None


def contradiction(module: str, is_quantized: bool) -> ModelError:
    stored, said = ("fp8", "whole") if is_quantized else ("whole", "fp8")
    return ModelError(
        f"the weight of {module} is stored {stored}, but quantization_config says that it is "
        f"{said}; config.json and weights do not belong together."
    )
