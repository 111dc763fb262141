"""One step on the device: draft, compute, choose, accept, without the host in between.

Three recorded passes make a step. The drafting round guesses `depth` tokens for each of its rows,
one model pass after the other. The body computes prompts, last tokens and drafts of all rows in one
pass. The head looks at those of its tokens that predict something, chooses, and commits what was
guessed right. What differs from step to step is a small table of entries, copied in before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.gpu.accept import accept_drafts, outcome_width
from outrider.kernels.gpu.adjust import adjust_logits, count_tokens
from outrider.kernels.gpu.layout import (
    FIRST_TOKENS,
    EntryColumn,
    PassBuffers,
    TotalColumn,
    lay_out_draft,
    lay_out_target,
)
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.recorded.recording import MAX_RECORDED_TOKENS, RecordedPasses, row_sizes
from outrider.workers.runner import Runner

MAX_BEHIND = 8
"""A draft can catch up on so many committed tokens without the host."""

_TOTALS = 2 * TotalColumn.SIZE  # the target's, then the draft's


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


class StepPlanBuffers:
    """The plan of a step on the device: entries of the target's pass, those of the drafting round,
    and the totals of both, in one piece of memory so that one copy brings it."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        entries = num_rows * EntryColumn.SIZE
        self.whole = torch.zeros(2 * (TotalColumn.SIZE + entries), dtype=torch.int32, device=device)
        drafting = _TOTALS + entries
        self.target_totals = self.whole[: TotalColumn.SIZE]
        self.draft_totals = self.whole[TotalColumn.SIZE : _TOTALS]
        self.target_entries = self.whole[_TOTALS:drafting].view(EntryColumn.SIZE, num_rows)
        self.draft_entries = self.whole[drafting:].view(EntryColumn.SIZE, num_rows)
        self._num_rows = num_rows
        self._is_cuda = device.type == "cuda"
        # Passes run before there is a plan, to be recorded: they must find nobody's rows in it.
        self.fill((), (), (0, 0, 0))

    def fill(
        self,
        entries: Sequence[tuple[int, ...]],
        drafting: Sequence[tuple[int, ...]],
        totals: tuple[int, int, int],
    ) -> None:
        """Copy a plan in behind the steps under way. Entries beyond it have no depth, which keeps
        `accept_drafts` off them."""
        values = np.full(self.whole.shape, -1, dtype=np.int32)
        values[:_TOTALS] = (*totals, len(entries), 0, 0, 0, len(drafting))
        tables = values[_TOTALS:].reshape(2, EntryColumn.SIZE, self._num_rows)
        for table, rows in zip(tables, (entries, drafting), strict=True):
            if rows:
                table[:, : len(rows)] = np.array(rows).T
        host = torch.from_numpy(values)
        # From ordinary memory the copy would wait for everything under way.
        self.whole.copy_(host.pin_memory() if self._is_cuda else host, non_blocking=True)


class TargetPasses:
    """Body and head of the target."""

    def __init__(
        self, runner: Runner, rows: DeviceRows, plan: StepPlanBuffers, sizes: StepSizes
    ) -> None:
        self._runner = runner
        self._decoder, self._kv = runner.decoder, runner.kv
        self._rows = rows
        self._plan = plan
        self._sizes = sizes
        device = runner.device
        self._tile_tokens = self._decoder.tile_tokens(sizes.depth + 1)
        self._buffers = PassBuffers.create(
            sizes.tokens, _max_tiles(sizes, self._tile_tokens), sizes.logits, device
        )
        spec = self._decoder.spec
        self._hidden = torch.zeros(
            sizes.logits, spec.hidden_size, dtype=self._decoder.dtype, device=device
        )
        self._chosen = torch.zeros(sizes.logits, dtype=torch.int32, device=device)
        self.outcomes = torch.zeros(
            sizes.rows, outcome_width(max(sizes.depth, 1)), dtype=torch.int32, device=device
        )
        recorded = min(MAX_RECORDED_TOKENS, sizes.tokens)
        self.body = RecordedPasses(self._compute, row_sizes(recorded), device)
        self.head = RecordedPasses(self._choose, row_sizes(sizes.logits), device)

    def tile_tokens(self, num_tokens: int) -> int:
        """How many tokens of a row a tile takes in a pass of so many tokens."""
        if num_tokens <= self.body.largest:
            return self._tile_tokens
        return self._decoder.tile_tokens(num_tokens)

    @torch.inference_mode()
    def run(self, num_tokens: int, num_tiles: int, num_logits: int) -> None:
        if num_tokens <= self.body.largest:
            self.body.run(num_tokens)
        else:
            buffers = self._buffers.first(num_tokens, num_tiles, num_logits)
            self._pass(buffers, self._sizes.rows, num_tokens)
        if num_logits:
            self.head.run(num_logits)

    def _compute(self, size: int) -> None:
        entries = min(size, self._sizes.rows)
        logits = min(size, self._sizes.logits)
        tiles = min(entries + size // self._tile_tokens, size)
        self._pass(self._buffers.first(size, tiles, logits), entries, self._sizes.depth + 1)

    def _pass(self, buffers: PassBuffers, num_entries: int, max_query_len: int) -> None:
        plan, tables = self._plan, self._rows.target_tables
        lay_out_target(
            plan.target_entries[:, :num_entries],
            plan.target_totals,
            self._rows.text,
            tables,
            buffers,
            self._kv.block_size,
            self._decoder.tile_tokens(max_query_len),
        )
        batch = buffers.batch(tables, max_query_len, self._sizes.max_len)
        index = buffers.logit_tokens
        hidden = self._decoder.forward_some(buffers.ids, batch, self._kv, index)
        self._hidden[: index.shape[0]].copy_(hidden)

    def _choose(self, size: int) -> None:
        logits = self._decoder.logits(self._hidden[:size])[:, : self._runner.vocab_size]
        rows, positions = self._buffers.logit_rows[:size], self._buffers.logit_positions[:size]
        text, adjustments = self._rows.text, self._rows.adjustments
        adjust_logits(logits, adjustments, rows, positions, text.lengths, text.drafts)
        choose_tokens(logits, self._rows.settings, rows, positions, self._chosen[:size])
        entries = self._plan.target_entries  # all of them: some have tokens but no logits
        depths, numbers = entries[EntryColumn.DEPTH], entries[EntryColumn.ROW]
        first_logit = entries[EntryColumn.FIRST_LOGIT]
        accept_drafts(self._chosen, first_logit, depths, numbers, text, self.outcomes)
        count_tokens(self.outcomes, depths, numbers, adjustments)


class DraftPasses:
    """The drafting round of a draft model on the same device."""

    def __init__(
        self, runner: Runner, rows: DeviceRows, plan: StepPlanBuffers, sizes: StepSizes
    ) -> None:
        self._runner = runner
        self._decoder, self._kv = runner.decoder, runner.kv
        self._rows = rows
        self._plan = plan
        self._sizes = sizes
        device = runner.device
        tokens = MAX_BEHIND * sizes.rows
        self._buffers = PassBuffers.create(tokens, tokens, sizes.rows, device)
        self.round = RecordedPasses(self._draft, row_sizes(sizes.rows), device)

    @torch.inference_mode()
    def catch_up(self, num_rows: int) -> None:
        """Bring the draft's KV up to the text, for rows that a round would leave gaps in. It is
        rare, so it is not recorded."""
        self._compute(self._lay_out(num_rows, 0, MAX_BEHIND), MAX_BEHIND)

    def _draft(self, num_rows: int) -> None:
        for index in range(self._sizes.depth):
            self._guess(num_rows, index)

    def _guess(self, num_rows: int, index: int) -> None:
        """The token behind the text and the first `index` drafts."""
        buffers = self._lay_out(num_rows, index, FIRST_TOKENS)
        hidden = self._compute(buffers, FIRST_TOKENS)
        logits = self._decoder.logits(hidden)[:, : self._runner.vocab_size]
        rows, positions = buffers.logit_rows, buffers.logit_positions
        text = self._rows.text
        adjust_logits(logits, self._rows.adjustments, rows, positions, text.lengths, text.drafts)
        out = text.drafts[:, index]
        choose_tokens(logits, self._rows.settings, rows, positions, out, by_row=True)

    def _lay_out(self, num_rows: int, index: int, num_committed: int) -> PassBuffers:
        tokens = 1 if index else num_committed
        tile_tokens = self._decoder.tile_tokens(num_committed)
        tiles = -(-tokens // tile_tokens)
        buffers = self._buffers.first(tokens * num_rows, tiles * num_rows, num_rows)
        lay_out_draft(
            self._plan.draft_entries[:, :num_rows],
            self._plan.draft_totals,
            self._rows.text,
            self._rows.draft_tables,
            buffers,
            self._kv.block_size,
            tile_tokens,
            index,
            num_committed,
        )
        return buffers

    def _compute(self, buffers: PassBuffers, num_committed: int) -> Tensor:
        """Hidden states of the tokens that predict something."""
        ids = self._runner.known_ids(buffers.ids)
        batch = buffers.batch(self._rows.draft_tables, num_committed, self._sizes.max_len)
        return self._decoder.forward_some(ids, batch, self._kv, buffers.logit_tokens)


def _max_tiles(sizes: StepSizes, tile_tokens: int) -> int:
    return min(sizes.rows + sizes.tokens // tile_tokens, sizes.tokens)
