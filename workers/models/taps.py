"""What passes by in a decoder and is kept for somebody who reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Taps:
    """Keeps the residual stream entering some layers, of one pass at a time; none keep nothing."""

    __slots__ = ("_kept", "layers")

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.layers = tuple(layers)
        self._kept: dict[int, Tensor] = {}

    def pass_by(self, layer: int, stream: Tensor) -> None:
        if layer in self.layers:
            self._kept[layer] = stream

    @property
    def features(self) -> Tensor:
        """[T, layers * hidden_size], in the order they were asked for."""
        return torch.cat([self._kept[layer] for layer in self.layers], dim=-1)

    def write(self, out: Tensor) -> None:
        """The features into `out`; they are let go."""
        torch.cat([self._kept[layer] for layer in self.layers], dim=-1, out=out)
        self._kept.clear()
