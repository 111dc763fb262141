"""The tensors of one quantized layer, checked as they are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.errors import ModelError
from outrider.workers.weights.safetensors_files import WHOLE, damaged
from outrider.workers.weights.safetensors_source import SafetensorsSource


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """`module` is the layer's name in the checkpoint."""

    weights: SafetensorsSource
    module: str

    def has(self, suffix: str) -> bool:
        return self.weights.has(f"{self.module}.{suffix}")

    def shape(self, suffix: str) -> tuple[int, ...]:
        return tuple(self.weights.stored(f"{self.module}.{suffix}").get_shape())

    def read(self, suffix: str, *expected: tuple[int, ...]) -> Tensor:
        """A tensor of one of these shapes, whole, as it is stored."""
        if self.shape(suffix) not in expected:
            raise self.unfit(suffix, expected[-1])
        return self.weights.read_stored(f"{self.module}.{suffix}")

    def check_words(self, suffix: str, expected: tuple[int, ...]) -> None:
        """Of packed numbers."""
        if self.shape(suffix) != expected:
            raise self.unfit(suffix, expected)
        self._check_dtype(suffix, "packed numbers", ("I32",))

    def read_indices(self, suffix: str, expected: tuple[int, ...]) -> Tensor:
        self._check_dtype(suffix, "indices", ("I32", "I64"))
        return self.read(suffix, expected).long()

    def _check_dtype(self, suffix: str, kind: str, dtypes: tuple[str, ...]) -> None:
        dtype = self.weights.stored(f"{self.module}.{suffix}").get_dtype()
        if dtype not in dtypes:
            raise ModelError(
                f"{self._path(suffix)} holds {self.module}.{suffix} as {dtype}, and {kind} are "
                f"{' or '.join(dtypes)}; get the complete checkpoint again."
            )

    def read_words(self, suffix: str, expected: tuple[int, ...]) -> Tensor:
        self.check_words(suffix, expected)
        return self.read(suffix, expected)

    def read_scales(
        self, suffix: str, *expected: tuple[int, ...], may_be_negative: bool = False
    ) -> Tensor:
        """`read` as float32."""
        self._check_dtype(suffix, "scales", WHOLE)
        scales = self.read(suffix, *expected).float()
        if not (torch.isfinite(scales) & ((scales >= 0) | may_be_negative)).all():
            raise ModelError(
                f"{self._path(suffix)} holds {self.module}.{suffix} with numbers that are no "
                "scales: negative, infinite or NaN; download it again."
            )
        return scales

    def slice(self, suffix: str, rows: range, columns: range) -> Tensor:
        stored = self.weights.stored(f"{self.module}.{suffix}")
        try:
            values: Tensor = stored[rows.start : rows.stop, columns.start : columns.stop]
        except SafetensorError as error:
            raise damaged(self.weights.path_of(f"{self.module}.{suffix}"), error) from None
        # Copy: the slice is in the mapped file, which may be replaced while we run.
        return values.clone(memory_format=torch.contiguous_format)

    def unfit(self, suffix: str, expected: tuple[int, ...]) -> ModelError:
        return ModelError(
            f"{self._path(suffix)} holds {self.module}.{suffix} with shape "
            f"{list(self.shape(suffix))}, but the configuration asks for {list(expected)}; "
            "config.json and weights do not belong together."
        )

    def zero(self, suffix: str) -> ModelError:
        return ModelError(
            f"{self._path(suffix)} holds {self.module}.{suffix} of 0; download it again."
        )

    def _path(self, suffix: str) -> str:
        return str(self.weights.path_of(f"{self.module}.{suffix}"))
