"""The plan of a step as the device reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.gpu.layout import EntryColumn, TotalColumn


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most one step holds."""

    rows: int
    tokens: int
    depth: int
    max_len: int

    @property
    def logits(self) -> int:
        return min(self.rows * (self.depth + 1), self.tokens)


@dataclass(frozen=True, slots=True)
class PassEntries:
    """What one pass is laid out from."""

    entries: Tensor  # int32 [EntryColumn.SIZE, rows]
    totals: Tensor  # int32 [TotalColumn.SIZE]


class StepPlanBuffers:
    """Entries and totals of the target's pass and of every proposer's round, in one piece of memory
    so that one copy brings them."""

    def __init__(self, num_rows: int, num_proposers: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._num_tables = 1 + num_proposers
        self._num_totals = self._num_tables * TotalColumn.SIZE
        size = self._num_totals + self._num_tables * EntryColumn.SIZE * num_rows
        self._whole = torch.zeros(size, dtype=torch.int32, device=device)
        totals = self._whole[: self._num_totals].view(self._num_tables, TotalColumn.SIZE)
        tables = self._whole[self._num_totals :].view(self._num_tables, EntryColumn.SIZE, num_rows)
        passes = [PassEntries(*each) for each in zip(tables, totals, strict=True)]
        self.target, self.drafting = passes[0], passes[1:]
        self._is_cuda = device.type == "cuda"
        # Passes run before there is a plan, to be recorded: they must find nobody's rows in it.
        self.fill((), ((),) * num_proposers, (0, 0, 0))

    def fill(
        self,
        entries: Sequence[tuple[int, ...]],
        drafting: Sequence[Sequence[tuple[int, ...]]],
        totals: tuple[int, int, int],
    ) -> None:
        """Copy a plan in behind the steps under way. Entries beyond it have no depth, which keeps
        `accept_drafts` off them."""
        values = np.full(self._whole.shape, -1, dtype=np.int32)
        counts = values[: self._num_totals].reshape(self._num_tables, TotalColumn.SIZE)
        tables = values[self._num_totals :].reshape(
            self._num_tables, EntryColumn.SIZE, self._num_rows
        )
        for count, table, rows in zip(counts, tables, (entries, *drafting), strict=True):
            count[:] = (0, 0, 0, len(rows))
            if rows:
                table[:, : len(rows)] = np.array(rows).T
        counts[0, : len(totals)] = totals
        host = torch.from_numpy(values)
        # From ordinary memory the copy would wait for everything under way.
        self._whole.copy_(host.pin_memory() if self._is_cuda else host, non_blocking=True)
