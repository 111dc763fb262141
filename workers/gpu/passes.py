"""One step on the device: draft, compute, choose, accept, without the host in between.

Three recorded passes make a step. The drafting round guesses `depth` tokens for each of its rows,
one model pass after the other. The body computes prompts, last tokens and drafts of all rows in one
pass. The head looks at those of its tokens that predict something, chooses, and commits what was
guessed right. What differs from step to step is a small table of entries, copied in before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.gpu.accept import accept_drafts, outcome_width
from outrider.kernels.gpu.adjust import adjust_logits, count_tokens
from outrider.kernels.gpu.layout import (
    FIRST_TOKENS,
    EntryColumn,
    PassBuffers,
    lay_out_draft,
    lay_out_target,
)
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.workers.gpu.plan_buffers import PassEntries, StepSizes
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.recorded.recording import MAX_RECORDED_TOKENS, RecordedPasses, row_sizes
from outrider.workers.runner import Runner


class TargetPasses:
    """Body and head of the target."""

    def __init__(
        self, runner: Runner, rows: DeviceRows, plan: PassEntries, sizes: StepSizes
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
            plan.entries[:, :num_entries],
            plan.totals,
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
        entries = self._plan.entries  # all of them: some have tokens but no logits
        depths, numbers = entries[EntryColumn.DEPTH], entries[EntryColumn.ROW]
        first_logit = entries[EntryColumn.FIRST_LOGIT]
        accept_drafts(self._chosen, first_logit, depths, numbers, text, self.outcomes)
        count_tokens(self.outcomes, depths, numbers, adjustments)


class DraftPasses:
    """The drafting round of a draft model on the same device."""

    def __init__(
        self, runner: Runner, rows: DeviceRows, plan: PassEntries, sizes: StepSizes
    ) -> None:
        self._runner = runner
        self._decoder, self._kv = runner.decoder, runner.kv
        self._rows = rows
        self._plan = plan
        self._sizes = sizes
        device = runner.device
        tokens = FIRST_TOKENS * sizes.rows
        self._buffers = PassBuffers.create(tokens, tokens, sizes.rows, device)
        self._round = RecordedPasses(self._draft, row_sizes(sizes.rows), device)

    @property
    def recordings(self) -> Sequence[RecordedPasses]:
        return [self._round]

    def draft(self, num_rows: int) -> None:
        self._round.run(num_rows)

    def _draft(self, num_rows: int) -> None:
        for index in range(self._sizes.depth):
            self._guess(num_rows, index)

    def _guess(self, num_rows: int, index: int) -> None:
        """The token behind the text and the first `index` drafts."""
        buffers = self._lay_out(num_rows, index)
        hidden = self._compute(buffers)
        logits = self._decoder.logits(hidden)[:, : self._runner.vocab_size]
        rows, positions = buffers.logit_rows, buffers.logit_positions
        text = self._rows.text
        adjust_logits(logits, self._rows.adjustments, rows, positions, text.lengths, text.drafts)
        out = text.drafts[:, index]
        choose_tokens(logits, self._rows.settings, rows, positions, out, by_row=True)

    def _lay_out(self, num_rows: int, index: int) -> PassBuffers:
        tokens = 1 if index else FIRST_TOKENS
        tile_tokens = self._decoder.tile_tokens(FIRST_TOKENS)
        tiles = -(-tokens // tile_tokens)
        buffers = self._buffers.first(tokens * num_rows, tiles * num_rows, num_rows)
        lay_out_draft(
            self._plan.entries[:, :num_rows],
            self._plan.totals,
            self._rows.text,
            self._rows.draft_tables,
            buffers,
            self._kv.block_size,
            tile_tokens,
            index,
        )
        return buffers

    def _compute(self, buffers: PassBuffers) -> Tensor:
        """Hidden states of the tokens that predict something."""
        ids = self._runner.known_ids(buffers.ids)
        batch = buffers.batch(self._rows.draft_tables, FIRST_TOKENS, self._sizes.max_len)
        return self._decoder.forward_some(ids, batch, self._kv, buffers.logit_tokens)


def _max_tiles(sizes: StepSizes, tile_tokens: int) -> int:
    return min(sizes.rows + sizes.tokens // tile_tokens, sizes.tokens)
