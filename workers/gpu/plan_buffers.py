"""The plan of a step as the device reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.gpu.columns import EntryColumn, TotalColumn
from outrider.scheduler.types import StepPlan
from outrider.workers.gpu.readback import PinnedRing


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step."""

    rows: int
    tokens: int
    depth: int
    max_len: int

    @property
    def logits(self) -> int:
        return min(self.rows * (self.depth + 1), self.tokens)


@dataclass(frozen=True, slots=True)
class PassEntries:
    """The inputs that one pass is laid out from."""

    entries: Tensor  # int32 [EntryColumn.SIZE, rows]
    totals: Tensor  # int32 [TotalColumn.SIZE]


@dataclass(slots=True)
class PassShare:
    """Entries of a pass over known text of some rows."""

    tile_tokens: int = 1
    entries: list[tuple[int, ...]] = field(default_factory=list)
    num_tokens: int = 0
    num_tiles: int = 0
    num_logits: int = 0

    def add(self, row: int, start: int, count: int, depth: int) -> None:
        """Add `count` tokens from position `start` on; the last `depth` + 1 predict."""
        first, tile, logit = self.totals
        self.entries.append((row, count, start, depth, first, tile, logit, 0))
        self.num_tokens += count
        self.num_tiles += -(-count // self.tile_tokens)
        self.num_logits += depth + 1

    @property
    def totals(self) -> tuple[int, int, int]:
        return self.num_tokens, self.num_tiles, self.num_logits


_NOTHING = PassShare()


class StepPlanBuffers:
    """Entries and totals of the target's pass, of every proposer's round and of draft catch-up, in
    one buffer so that one copy uploads them."""

    def __init__(self, num_rows: int, num_proposers: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._num_tables = 2 + num_proposers
        self._num_totals = self._num_tables * TotalColumn.SIZE
        size = self._num_totals + self._num_tables * EntryColumn.SIZE * num_rows
        self._whole = torch.zeros(size, dtype=torch.int32, device=device)
        totals = self._whole[: self._num_totals].view(self._num_tables, TotalColumn.SIZE)
        tables = self._whole[self._num_totals :].view(self._num_tables, EntryColumn.SIZE, num_rows)
        passes = [PassEntries(*each) for each in zip(tables, totals, strict=True)]
        self.target, *self.drafting, self.catch_up = passes
        self._staged = PinnedRing(self._whole)
        # Capture runs passes before there is a plan: it must contain no rows.
        self.fill((), ((),) * num_proposers, (0, 0, 0))

    def fill(
        self,
        entries: Sequence[tuple[int, ...]],
        drafting: Sequence[Sequence[tuple[int, ...]]],
        totals: tuple[int, int, int],
        num_selected: int = -1,
        tile_tokens: int = 1,
        catch_up: PassShare = _NOTHING,
    ) -> None:
        """Enqueue the copy of a plan; allocates no memory. Unused entries have no depth, so
        `accept_drafts` skips them. `num_selected` and `tile_tokens` are for `select_drafts`."""
        staged = self._staged.take()
        values = staged.numpy()
        values[:] = -1
        counts = values[: self._num_totals].reshape(self._num_tables, TotalColumn.SIZE)
        tables = values[self._num_totals :].reshape(
            self._num_tables, EntryColumn.SIZE, self._num_rows
        )
        everything = (entries, *drafting, catch_up.entries)
        for count, table, rows in zip(counts, tables, everything, strict=True):
            count[: TotalColumn.SELECTED] = (0, 0, 0, len(rows))
            if rows:
                table[:, : len(rows)] = np.array(rows).T
        counts[0, : len(totals)] = totals
        counts[-1, : len(totals)] = catch_up.totals
        counts[0, TotalColumn.SELECTED :] = (num_selected, tile_tokens)
        self._whole.copy_(staged, non_blocking=True)


def drafts_dropped(plan: StepPlan) -> int:
    """How many of the draft tokens that rows may verify the step leaves out."""
    if plan.num_selected is None:
        return 0
    return max(sum(row.num_verified for row in plan.rows) - plan.num_selected, 0)


def order_by_depth(entries: list[tuple[int, ...]]) -> list[int]:
    """Sort by depth, deepest first; returns how many rows draft each level."""
    entries.sort(key=itemgetter(EntryColumn.DEPTH), reverse=True)
    depths = [entry[EntryColumn.DEPTH] for entry in entries]
    return [sum(depth > level for depth in depths) for level in range(depths[0] if depths else 0)]
