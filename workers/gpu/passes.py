"""One step on the device: draft, compute, choose, accept, without the host in between.

Three kinds of captured passes make a step. A drafting round (`drafting.py`) drafts as many tokens
as each of its rows needs. The body computes prompts, last tokens and draft tokens of all rows in
one pass. The head computes logits of the tokens that predict, samples, and commits the accepted
draft tokens. What differs from step to step is a small table of entries, copied in first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.gpu.accept import accept_drafts, outcome_width
from outrider.kernels.gpu.adjust import adjust_logits, count_tokens
from outrider.kernels.gpu.columns import EntryColumn
from outrider.kernels.gpu.layout import PassBuffers, lay_out_target
from outrider.kernels.gpu.logprobs import keep_logits, logprob_width, report_logprobs
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.kernels.gpu.select import select_drafts
from outrider.scheduler.params import MAX_LOGPROBS
from outrider.scheduler.proposers import KvRule
from outrider.workers.cuda_graphs.captured_passes import (
    MAX_CAPTURED_TOKENS,
    MAX_MIXED_TOKENS,
    CapturedPasses,
    kernels_of,
    row_sizes,
)
from outrider.workers.gpu.plan_buffers import PassEntries, StepSizes
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.runner import Runner

_DECODE_TOKENS = MAX_CAPTURED_TOKENS
"""In larger passes prompts use large tiles."""


class TargetPasses:
    """Body and head of the target.

    The results of a pass are valid until the next: its plan and layout, the hidden states of the
    tokens that predict, outcomes, and the features of all tokens if the decoder is tapped.
    """

    def __init__(
        self,
        runner: Runner,
        rows: DeviceRows,
        plan: PassEntries,
        sizes: StepSizes,
        kv_rule: KvRule | None,
    ) -> None:
        """`kv_rule` is that of the proposer with KV in the draft pool, if there is one."""
        self._runner = runner
        self._decoder, self._kv = runner.decoder, runner.kv
        self._rows = rows
        self._kv_rule = kv_rule
        self.plan = plan
        self._sizes = sizes
        device = runner.device
        self._tile_tokens = self._decoder.tile_tokens(sizes.depth + 1)
        self.buffers = PassBuffers.create(
            sizes.tokens, _max_tiles(sizes, self._tile_tokens), sizes.logits, device
        )
        spec = self._decoder.spec
        self.hidden = torch.zeros(
            sizes.logits, spec.hidden_size, dtype=self._decoder.dtype, device=device
        )
        self.features: Tensor | None = None
        if self._decoder.num_features:
            self.features = torch.zeros(
                sizes.tokens, self._decoder.num_features, dtype=self._decoder.dtype, device=device
            )
        self._chosen = torch.zeros(sizes.logits, dtype=torch.int32, device=device)
        self.outcomes = torch.zeros(
            sizes.rows, outcome_width(max(sizes.depth, 1)), dtype=torch.int32, device=device
        )
        max_captured = min(MAX_MIXED_TOKENS, sizes.tokens)
        kernels = kernels_of(spec.num_layers)
        self.body = CapturedPasses(self._compute, row_sizes(max_captured), device, kernels)
        self.head = CapturedPasses(self._choose, row_sizes(sizes.logits), device)
        self.logprobs_head = CapturedPasses(
            self._choose_with_logprobs, _logprobs_sizes(sizes), device
        )
        self.logprobs = torch.zeros(
            sizes.logits, logprob_width(MAX_LOGPROBS), dtype=torch.int32, device=device
        )
        self.selection = CapturedPasses(self._select, _selection_sizes(sizes), device, kernels=1)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a row per tile slot."""
        return self._tile_tokens

    def max_query_len(self, num_tokens: int) -> int:
        """Per row; in a small pass prompts are cut into small tiles, like draft tokens."""
        return self._sizes.depth + 1 if num_tokens <= _DECODE_TOKENS else num_tokens

    @torch.inference_mode()
    def run(
        self,
        num_tokens: int,
        num_tiles: int,
        num_logits: int,
        num_selecting: int = 0,
        with_logprobs: bool = False,
    ) -> None:
        """Run a pass of this size. Draft tokens to verify are first selected among those of the
        first `num_selecting` entries. `with_logprobs` fills `logprobs`, one row per logit, for the
        rows that request them."""
        if num_selecting:
            self.selection.run(num_selecting)
        if num_tokens <= self.body.largest:
            self.body.run(num_tokens)
        else:
            buffers = self.buffers.first(num_tokens, num_tiles, num_logits)
            self._pass(buffers, self._sizes.rows, num_tokens)
        if num_logits:
            (self.logprobs_head if with_logprobs else self.head).run(num_logits)

    def _select(self, num_entries: int) -> None:
        plan = self.plan
        select_drafts(plan.entries[:, :num_entries], plan.totals, self._rows.confidences)

    def _compute(self, size: int) -> None:
        entries = min(size, self._sizes.rows)
        logits = min(size, self._sizes.logits)
        tiles = min(entries + size // self._tile_tokens, size)
        buffers = self.buffers.first(size, tiles, logits)
        self._pass(buffers, entries, self.max_query_len(size))

    def _pass(self, buffers: PassBuffers, num_entries: int, max_query_len: int) -> None:
        plan, tables = self.plan, self._rows.target_tables
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
        self.hidden[: index.shape[0]].copy_(hidden)
        if self.features is not None:
            self._decoder.write_features(self.features[: buffers.ids.shape[0]])

    def _choose_with_logprobs(self, size: int) -> None:
        logits, rows = self._logits(size), self.buffers.logit_rows[:size]
        num_top, kept = self._rows.num_top, torch.empty_like(logits)
        keep_logits(logits, rows, num_top, kept)
        self._choose_from(logits)
        report_logprobs(kept, self._chosen[:size], rows, num_top, self.logprobs[:size])

    def _choose(self, size: int) -> None:
        self._choose_from(self._logits(size))

    def _logits(self, size: int) -> Tensor:
        return self._runner.whole_logits(self.hidden[:size])

    def _choose_from(self, logits: Tensor) -> None:
        size = logits.shape[0]
        rows, positions = self.buffers.logit_rows[:size], self.buffers.logit_positions[:size]
        text, adjustments = self._rows.text, self._rows.adjustments
        adjust_logits(logits, adjustments, rows, positions, text.lengths, text.drafts)
        choose_tokens(logits, self._rows.settings, rows, positions, self._chosen[:size])
        entries = self.plan.entries  # all of them: some have tokens but no logits
        depths, numbers = entries[EntryColumn.DEPTH], entries[EntryColumn.ROW]
        first_logit, drafted = entries[EntryColumn.FIRST_LOGIT], entries[EntryColumn.DRAFTED]
        columns = (first_logit, depths, drafted, numbers)
        accept_drafts(self._chosen, *columns, text, self.outcomes, self._kv_rule)
        count_tokens(self.outcomes, depths, numbers, adjustments)


def _selection_sizes(sizes: StepSizes) -> list[int]:
    """Few: the cost hardly depends on the number of entries."""
    if not sizes.depth:
        return []
    return [size for size in (16, 64, 256) if size < sizes.rows] + [sizes.rows]


def _logprobs_sizes(sizes: StepSizes) -> list[int]:
    """Fewer than for the plain head: few steps need log-probabilities."""
    some = (8, 32, 64, 96, 128, 192, 256, 384, 512, 768)
    return [size for size in some if size < sizes.logits] + [sizes.logits]


def _max_tiles(sizes: StepSizes, tile_tokens: int) -> int:
    return min(sizes.rows + sizes.tokens // tile_tokens, sizes.tokens)
