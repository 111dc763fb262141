"""Taps: auxiliary hidden states of a decoder, kept for a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Taps:
    """Keeps the residual stream entering some layers, of one pass at a time."""

    __slots__ = ("_kept", "layers")

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.layers = tuple(layers)
        self._kept: dict[int, Tensor] = {}

    def observe(self, layer: int, stream: Tensor) -> None:
        if layer in self.layers:
            self._kept[layer] = stream

    @property
    def features(self) -> Tensor:
        """[T, layers * hidden_size], in the order of `layers`."""
        return torch.cat([self._kept[layer] for layer in self.layers], dim=-1)

    def write(self, out: Tensor) -> None:
        """Write the features into `out` and release them."""
        torch.cat([self._kept[layer] for layer in self.layers], dim=-1, out=out)
        self._kept.clear()
