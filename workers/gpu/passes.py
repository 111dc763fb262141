"""One step on the device: draft, compute, choose, accept, without the host in between.

Three kinds of recorded passes make a step. A drafting round guesses as many tokens as each of its
rows wants, one model pass after the other. The body computes prompts, last tokens and drafts of all
rows in one pass. The head looks at those of its tokens that predict something, chooses, and commits
what was guessed right. What differs from step to step is a small table of entries, copied in
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.kernels.gpu.accept import accept_drafts, outcome_width
from outrider.kernels.gpu.adjust import adjust_logits, count_tokens
from outrider.kernels.gpu.layout import (
    FIRST_TOKENS,
    EntryColumn,
    PassBuffers,
    keep_drafts,
    lay_out_draft,
    lay_out_target,
)
from outrider.kernels.gpu.logprobs import keep_logits, logprob_width, tell_logprobs
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.kernels.gpu.select import select_drafts
from outrider.scheduler.params import MAX_LOGPROBS
from outrider.workers.gpu.plan_buffers import PassEntries, StepSizes
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.recorded.recording import (
    MAX_MIXED_TOKENS,
    MAX_RECORDED_TOKENS,
    RecordedPasses,
    kernels_of,
    row_sizes,
)
from outrider.workers.runner import Runner

_DECODE_TOKENS = MAX_RECORDED_TOKENS
"""In larger passes prompts have the large tiles they want."""
_ROUND_ROWS = (1, 2, 4, 8, 16)
"""Rounds of up to so many rows are recorded whole."""


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
        recorded = min(MAX_MIXED_TOKENS, sizes.tokens)
        kernels = kernels_of(spec.num_layers)
        self.body = RecordedPasses(self._compute, row_sizes(recorded), device, kernels)
        self.head = RecordedPasses(self._choose, row_sizes(sizes.logits), device)
        self.telling_head = RecordedPasses(self._choose_and_tell, _telling_sizes(sizes), device)
        self.logprobs = torch.zeros(
            sizes.logits, logprob_width(MAX_LOGPROBS), dtype=torch.int32, device=device
        )
        self.selection = RecordedPasses(self._select, _selection_sizes(sizes), device, kernels=1)

    @property
    def tile_tokens(self) -> int:
        """By how many tokens of a row the places of tiles are counted."""
        return self._tile_tokens

    def _max_query_len(self, num_tokens: int) -> int:
        """Of one row; in a small pass prompts are cut like verification, into small tiles."""
        return self._sizes.depth + 1 if num_tokens <= _DECODE_TOKENS else num_tokens

    @torch.inference_mode()
    def run(
        self,
        num_tokens: int,
        num_tiles: int,
        num_logits: int,
        num_selecting: int = 0,
        tells_logprobs: bool = False,
    ) -> None:
        """The pass over so much; first, the drafts to verify are selected among those of the first
        `num_selecting` entries. It `tells_logprobs` of the rows that want to know them, at the
        places of their logits."""
        if num_selecting:
            self.selection.run(num_selecting)
        if num_tokens <= self.body.largest:
            self.body.run(num_tokens)
        else:
            buffers = self._buffers.first(num_tokens, num_tiles, num_logits)
            self._pass(buffers, self._sizes.rows, num_tokens)
        if num_logits:
            (self.telling_head if tells_logprobs else self.head).run(num_logits)

    def _select(self, num_entries: int) -> None:
        plan = self._plan
        select_drafts(plan.entries[:, :num_entries], plan.totals, self._rows.confidences)

    def _compute(self, size: int) -> None:
        entries = min(size, self._sizes.rows)
        logits = min(size, self._sizes.logits)
        tiles = min(entries + size // self._tile_tokens, size)
        buffers = self._buffers.first(size, tiles, logits)
        self._pass(buffers, entries, self._max_query_len(size))

    def _pass(self, buffers: PassBuffers, num_entries: int, max_query_len: int) -> None:
        plan, tables = self._plan, self._rows.target_tables
        long_tile = self._decoder.tile_tokens(max_query_len)
        long_tile -= long_tile % self._tile_tokens
        lay_out_target(
            plan.entries[:, :num_entries],
            plan.totals,
            self._rows.text,
            tables,
            buffers,
            self._kv.block_size,
            self._tile_tokens,
            long_tile,
        )
        places = long_tile // self._tile_tokens if long_tile > self._tile_tokens else 0
        batch = buffers.batch(tables, max_query_len, self._sizes.max_len, places)
        index = buffers.logit_tokens
        hidden = self._decoder.forward_some(buffers.ids, batch, self._kv, index)
        self._hidden[: index.shape[0]].copy_(hidden)

    def _choose_and_tell(self, size: int) -> None:
        logits, rows = self._logits(size), self._buffers.logit_rows[:size]
        num_top, kept = self._rows.num_top, torch.empty_like(logits)
        keep_logits(logits, rows, num_top, kept)
        self._choose_from(logits)
        tell_logprobs(kept, self._chosen[:size], rows, num_top, self.logprobs[:size])

    def _choose(self, size: int) -> None:
        self._choose_from(self._logits(size))

    def _logits(self, size: int) -> Tensor:
        return self._decoder.logits(self._hidden[:size])[:, : self._runner.vocab_size]

    def _choose_from(self, logits: Tensor) -> None:
        size = logits.shape[0]
        rows, positions = self._buffers.logit_rows[:size], self._buffers.logit_positions[:size]
        text, adjustments = self._rows.text, self._rows.adjustments
        adjust_logits(logits, adjustments, rows, positions, text.lengths, text.drafts)
        choose_tokens(logits, self._rows.settings, rows, positions, self._chosen[:size])
        entries = self._plan.entries  # all of them: some have tokens but no logits
        depths, numbers = entries[EntryColumn.DEPTH], entries[EntryColumn.ROW]
        first_logit, drafted = entries[EntryColumn.FIRST_LOGIT], entries[EntryColumn.DRAFTED]
        accept_drafts(self._chosen, first_logit, depths, drafted, numbers, text, self.outcomes)
        count_tokens(self.outcomes, depths, numbers, adjustments)


class DraftPasses:
    """Drafting rounds of a draft model on the same device.

    Of few rows a whole round is one recording for each depth: there rows cost nothing, and gaps
    between recordings do. With more, a round is run level by level, each over the rows that want
    it: one recording by number of rows makes everybody's first draft, another any later one.
    """

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
        self._level = torch.ones(1, dtype=torch.int32, device=device)  # of the pass to come
        self._guesses = torch.zeros(sizes.rows, dtype=torch.int32, device=device)
        self._chances = torch.zeros(sizes.rows, device=device)
        few = [size for size in _ROUND_ROWS if size < sizes.rows]
        few = few if len(few) == len(_ROUND_ROWS) else [*few, sizes.rows]
        kernels = kernels_of(self._decoder.spec.num_layers)
        self.rounds = [
            RecordedPasses(partial(self._draft, depth), few, device, depth * kernels)
            for depth in range(1, sizes.depth + 1)
        ]
        many = [size for size in row_sizes(sizes.rows) if size > _ROUND_ROWS[-1]]
        self.first = RecordedPasses(self._begin, many, device, kernels)
        any_number = row_sizes(sizes.rows) if many else []
        self.next = RecordedPasses(self._go_on, any_number, device, kernels)

    @property
    def recordings(self) -> Sequence[RecordedPasses]:
        return [self.first, self.next, *reversed(self.rounds)]

    def begin(self, row: int) -> None:
        """What is known of a row is its text and its KV."""

    def draft(self, counts: Sequence[int]) -> None:
        if counts[0] <= _ROUND_ROWS[-1]:
            self.rounds[len(counts) - 1].run(counts[0])
            return
        self.first.run(counts[0])
        for count in counts[1:]:
            self.next.run(count)

    def _draft(self, depth: int, num_rows: int) -> None:
        for index in range(depth):
            self._guess(num_rows, index)

    def _begin(self, num_rows: int) -> None:
        self._guess(num_rows, 0)
        self._level.fill_(1)

    def _go_on(self, num_rows: int) -> None:
        buffers = self._lay_out(num_rows, self._level)
        self._choose(buffers, self._guesses, self._chances)
        text, sure = self._rows.text, self._rows.confidences
        keep_drafts(buffers.logit_rows, self._guesses, self._chances, text, sure, self._level)

    def _guess(self, num_rows: int, index: int) -> None:
        """The token behind the text and the first `index` drafts."""
        buffers = self._lay_out(num_rows, index)
        self._choose(buffers, self._rows.text.drafts[:, index], self._rows.confidences[:, index])

    def _choose(self, buffers: PassBuffers, out: Tensor, sure: Tensor) -> None:
        """Run the pass; what each row chooses, and how sure of it, by row number."""
        hidden = self._compute(buffers)
        logits = self._decoder.logits(hidden)[:, : self._runner.vocab_size]
        rows, positions = buffers.logit_rows, buffers.logit_positions
        text = self._rows.text
        adjust_logits(logits, self._rows.adjustments, rows, positions, text.lengths, text.drafts)
        choose_tokens(logits, self._rows.settings, rows, positions, out, sure, by_row=True)

    def _lay_out(self, num_rows: int, level: int | Tensor) -> PassBuffers:
        tokens = FIRST_TOKENS if isinstance(level, int) and level == 0 else 1
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
            level,
        )
        return buffers

    def _compute(self, buffers: PassBuffers) -> Tensor:
        """Hidden states of the tokens that predict something."""
        ids = self._runner.known_ids(buffers.ids)
        batch = buffers.batch(self._rows.draft_tables, FIRST_TOKENS, self._sizes.max_len)
        return self._decoder.forward_some(ids, batch, self._kv, buffers.logit_tokens)


def _selection_sizes(sizes: StepSizes) -> list[int]:
    """Few: what it costs hardly depends on the entries."""
    if not sizes.depth:
        return []
    return [size for size in (16, 64, 256) if size < sizes.rows] + [sizes.rows]


def _telling_sizes(sizes: StepSizes) -> list[int]:
    """Fewer than of the head without: few steps have somebody who wants to know."""
    some = (8, 32, 64, 96, 128, 192, 256, 384, 512, 768)
    return [size for size in some if size < sizes.logits] + [sizes.logits]


def _max_tiles(sizes: StepSizes, tile_tokens: int) -> int:
    return min(sizes.rows + sizes.tokens // tile_tokens, sizes.tokens)
