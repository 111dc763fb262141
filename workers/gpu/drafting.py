"""Drafting rounds on the device: draft tokens one after the other, each from the one before.

With few rows a whole round is one CUDA graph per depth: extra rows are free there, gaps between
graphs are not. With more rows a round runs level by level, each over the rows that draft so deep:
one graph per number of rows for the first draft token, others for the later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.gpu.adjust import adjust_logits
from outrider.kernels.gpu.layout import FIRST_TOKENS, PassBuffers, lay_out_draft
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.kernels.gpu.tables import keep_drafts
from outrider.scheduler.types import StepPlan
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses, kernels_of, row_sizes
from outrider.workers.gpu.draft_catch_up import CatchUpReadback, DraftCatchUp
from outrider.workers.gpu.plan_buffers import PassShare, StepSizes
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.runner import Runner

_ROUND_ROWS = (1, 2, 4, 8, 16)
"""Rounds of up to the last of these numbers of rows are captured whole."""


class Drafter(Protocol):
    """Predicts the next token, level by level; all its buffers are at fixed addresses."""

    @property
    def has_uniform_levels(self) -> bool:
        """Whether one graph makes every draft token but the first. The level is then in device
        memory; otherwise it is an int."""
        ...

    def lay_out(self, num_rows: int, level: int | Tensor) -> PassBuffers:
        """The pass for draft token number `level` of the first `num_rows` rows of the round."""
        ...

    def logits(self, buffers: PassBuffers, level: int | Tensor) -> Tensor:
        """Run the pass; one row of logits per row of the round."""
        ...


class DraftRounds:
    """The rounds of one drafter, captured."""

    def __init__(
        self,
        drafter: Drafter,
        rows: DeviceRows,
        sizes: StepSizes,
        kernels: int,
        device: torch.device,
    ) -> None:
        """`kernels` is about how many kernels one level launches."""
        self._drafter = drafter
        self._rows = rows
        self._level = torch.ones(1, dtype=torch.int32, device=device)  # of the next pass
        self._guesses = torch.zeros(sizes.rows, dtype=torch.int32, device=device)
        self._chances = torch.zeros(sizes.rows, device=device)
        few = [size for size in _ROUND_ROWS if size < sizes.rows]
        few = few if len(few) == len(_ROUND_ROWS) else [*few, sizes.rows]
        self.whole = [
            CapturedPasses(partial(self._draft, depth), few, device, depth * kernels)
            for depth in range(1, sizes.depth + 1)
        ]
        many = [size for size in row_sizes(sizes.rows) if size > _ROUND_ROWS[-1]]
        self.first = CapturedPasses(self._begin, many, device, kernels)
        any_number = row_sizes(sizes.rows) if many else []
        if drafter.has_uniform_levels:
            own = [CapturedPasses(self._go_on, any_number, device, kernels)]
            self.later = own * (sizes.depth - 1)  # one for each draft token but the first
        else:
            own = [
                CapturedPasses(partial(self._guess, level=level), any_number, device, kernels)
                for level in range(1, sizes.depth)
            ]
            self.later = own
        self.captured_passes = [self.first, *own, *reversed(self.whole)]

    def draft(self, counts: Sequence[int]) -> None:
        """See `DeviceProposer.draft`."""
        if counts[0] <= _ROUND_ROWS[-1]:
            self.whole[len(counts) - 1].run(counts[0])
            return
        self.first.run(counts[0])
        for later, count in zip(self.later, counts[1:], strict=False):
            later.run(count)

    def _draft(self, depth: int, num_rows: int) -> None:
        for level in range(depth):
            self._guess(num_rows, level)

    def _begin(self, num_rows: int) -> None:
        self._guess(num_rows, 0)
        self._level.fill_(1)

    def _go_on(self, num_rows: int) -> None:
        buffers = self._drafter.lay_out(num_rows, self._level)
        self._choose(buffers, self._level, self._guesses, self._chances)
        text, sure = self._rows.text, self._rows.confidences
        keep_drafts(buffers.logit_rows, self._guesses, self._chances, text, sure, self._level)

    def _guess(self, num_rows: int, level: int) -> None:
        """The token after the text and the first `level` draft tokens."""
        buffers = self._drafter.lay_out(num_rows, level)
        drafts, sure = self._rows.text.drafts[:, level], self._rows.confidences[:, level]
        self._choose(buffers, level, drafts, sure)

    def _choose(self, buffers: PassBuffers, level: int | Tensor, out: Tensor, sure: Tensor) -> None:
        """Run the pass; writes each row's token and its confidence, by row number."""
        logits = self._drafter.logits(buffers, level)
        rows, positions = buffers.logit_rows, buffers.logit_positions
        text = self._rows.text
        adjust_logits(logits, self._rows.adjustments, rows, positions, text.lengths, text.drafts)
        choose_tokens(logits, self._rows.settings, rows, positions, out, sure, by_row=True)


class DraftPasses(DeviceProposer):
    """A draft model on the same device: drafting rounds, and catch-up."""

    has_uniform_levels = True

    def __init__(self, runner: Runner, context: DeviceContext) -> None:
        rows, sizes = context.state, context.sizes
        self._runner = runner
        self._decoder, self._kv = runner.decoder, runner.kv
        self._rows = rows
        self._plan = context.entries
        self._sizes = sizes
        tokens = FIRST_TOKENS * sizes.rows
        self._buffers = PassBuffers.create(tokens, tokens, sizes.rows, runner.device)
        kernels = kernels_of(self._decoder.spec.num_layers)
        self.rounds: DraftRounds = DraftRounds(self, rows, sizes, kernels, runner.device)
        self._catch_up = DraftCatchUp(runner, context)
        self.catch_up_pass = self._catch_up.captured

    @property
    def captured_passes(self) -> Sequence[CapturedPasses]:
        return [*self.rounds.captured_passes, self._catch_up.captured]

    def take_late_results(self) -> Sequence[CatchUpReadback]:
        return self._catch_up.take_results()

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._runner.extend_table(row, start, blocks)
        self._rows.extend_draft_table(row, start, blocks)

    def plan_catch_up(self, plan: StepPlan) -> PassShare:
        return self._catch_up.plan(plan)

    def catch_up(self) -> None:
        self._catch_up.enqueue()

    def draft(self, counts: Sequence[int]) -> None:
        self.rounds.draft(counts)

    def lay_out(self, num_rows: int, level: int | Tensor) -> PassBuffers:
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

    def logits(self, buffers: PassBuffers, level: int | Tensor) -> Tensor:
        ids = self._runner.known_ids(buffers.ids)
        batch = buffers.batch(self._rows.draft_tables, FIRST_TOKENS, self._sizes.max_len)
        hidden = self._decoder.forward_some(ids, batch, self._kv, buffers.logit_tokens)
        return self._runner.whole_logits(hidden)
