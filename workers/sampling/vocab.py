"""Vocabulary sharding: the token ids of a rank's logits, and the ranks that hold the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from outrider.workers.groups.collective import Collective, SingleRankGroup


@dataclass(frozen=True)
class VocabPart:
    """One rank's part of the vocabulary; rank r holds the ids `bounds[r]` to `bounds[r + 1] - 1`.

    The rank of a single-rank group holds all of it.
    """

    bounds: tuple[int, ...]
    group: Collective

    @classmethod
    def whole(cls, size: int) -> VocabPart:
        return cls((0, size), SingleRankGroup())

    @classmethod
    def of(cls, ranges: Sequence[range], limit: int, group: Collective) -> VocabPart:
        """Consecutive `ranges` of ids, one per rank, without ids of `limit` and above."""
        bounds = (0, *(min(ids.stop, limit) for ids in ranges))
        return cls(bounds, group)

    @property
    def size(self) -> int:
        """Number of ids on all ranks together."""
        return self.bounds[-1]

    @cached_property
    def held(self) -> range:
        rank = self.group.rank
        return range(self.bounds[rank], self.bounds[rank + 1])

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of ids per rank."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    @cached_property
    def is_whole(self) -> bool:
        return self.group.size == 1

    @cached_property
    def is_sharded(self) -> bool:
        """Whether there are several ranks and each holds at least one id.

        A rank holds none if all its ids are beyond the limit; then rows are gathered.
        """
        return not self.is_whole and min(self.widths) > 0

    def gather(self, scores: Tensor) -> Tensor:
        """[n, size]: whole rows from every rank's columns [n, len(held)]."""
        if self.is_whole:
            return scores
        missing = max(self.widths) - scores.shape[-1]
        parts = self.group.all_gather(functional.pad(scores, (0, missing)))
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, self.widths, strict=True)], dim=-1
        )
