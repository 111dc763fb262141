"""Collective operations of a tensor-parallel group.

Every rank calls the same operations in the same order with the same shapes, so a choice between
them may depend only on what all ranks know: request parameters, or values already gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """A group of ranks, as one rank sees it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape]: every rank's tensor in rank order, the same on every rank."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same on every rank; may work in place."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Fill `tensor` with that of rank `root`."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRankGroup:
    """The group of a rank that holds a whole model."""

    rank: int = 0
    size: int = 1

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Nothing to do with one rank."""
