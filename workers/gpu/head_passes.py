"""A head on the target's hidden states, as passes on the device.

It extends over every target pass that has a row it may draft for, after the step's outcome is
enqueued, so it delays no token. The state of each row is kept in a table shared with steps on the
host (`HeadRunner.states`). A round drafts from there; the first draft token needs no pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.gpu.head_layout import (
    keep_states,
    lay_out_predicted,
    lay_out_successors,
    num_tile_places,
    take_states,
)
from outrider.kernels.gpu.layout import PassBuffers, lay_out_draft
from outrider.scheduler.types import StepPlan, Verdict
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses, kernels_of, row_sizes
from outrider.workers.gpu.drafting import DraftRounds
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer, LateResult
from outrider.workers.gpu.readback import StreamEvent, record_event, seconds_between
from outrider.workers.heads.runner import HeadRunner

_KERNELS = kernels_of(1)


class HeadExtension(NamedTuple):
    """The time span of one head extension."""

    begin: StreamEvent
    end: StreamEvent

    def added_to(self, verdict: Verdict) -> Verdict:
        """The time counts as verification, because every target pass needs an extension."""
        self.end.synchronize()
        return replace(verdict, verify_s=verdict.verify_s + seconds_between(self.begin, self.end))


class HeadPasses(DeviceProposer):
    """A head beside the target: extends over its passes, and drafts in rounds."""

    has_uniform_levels = False  # a head may have separate weights for each

    def __init__(self, runner: HeadRunner, context: DeviceContext) -> None:
        head, device = runner.head, runner.device
        passes, sizes = context.passes, context.sizes
        assert passes is not None
        if head.spec.keeps_kv and not head.spec.layers:
            raise ModelError(
                f"this {head.spec.kind} head attends to hidden states after the target's last "
                "norm, which exist for a few tokens of a pass only; run it on a CPU."
            )
        self._runner = runner
        self._head, self._kv = head, runner.kv
        self._passes = passes
        self._row_table = context.rows
        self._own: set[int] = set()  # rows whose proposer is this head
        self._rows = context.state
        self._plan = context.entries
        self._sizes = sizes
        self._tile_tokens = head.tile_tokens(sizes.depth + 1)  # of rows that decode; 0: no tiles
        self._buffers = PassBuffers.create(sizes.rows, sizes.rows, sizes.rows, device)
        self._drafted = torch.zeros_like(
            runner.states
        )  # states after the round's draft tokens so far
        reads_all = bool(head.spec.layers)
        num_slots = sizes.tokens if reads_all else sizes.logits
        self._next_ids = torch.zeros(num_slots, dtype=torch.int32, device=device)
        num_tiles = self._num_tiles(sizes.tokens, sizes.rows)
        self._tiles = torch.zeros(num_tiles, 4, dtype=torch.int32, device=device)
        self.extension = (
            CapturedPasses(self._extend_all, passes.body.sizes, device, _KERNELS)
            if reads_all
            else CapturedPasses(self._extend_some, row_sizes(sizes.logits), device, _KERNELS)
        )
        max_depth = sizes.depth if head.spec.max_depth is None else head.spec.max_depth
        own_sizes = replace(sizes, depth=min(max_depth, sizes.depth))
        self.rounds: DraftRounds = DraftRounds(self, self._rows, own_sizes, _KERNELS, device)
        self._unreported: list[HeadExtension] = []

    @property
    def captured_passes(self) -> Sequence[CapturedPasses]:
        return [self.extension, *self.rounds.captured_passes]

    def begin(self, row: int) -> None:
        """There is no state to reset: the step of a row's first token writes it."""
        is_own = self._row_table[row].init.proposer == self._head.spec.kind
        (self._own.add if is_own else self._own.discard)(row)

    # -- after a target pass -----------------------------------------------------------------

    def after_target_pass(self, plan: StepPlan, num_tokens: int, num_logits: int) -> None:
        if not any(row.row in self._own for row in plan.rows):
            return
        begin = record_event(self._runner.device)
        self.extend(num_tokens, num_logits)
        self._unreported.append(HeadExtension(begin, record_event(self._runner.device)))

    def take_late_results(self) -> Sequence[LateResult]:
        extensions, self._unreported = self._unreported, []
        return extensions

    @torch.inference_mode()
    def extend(self, num_tokens: int, num_logits: int) -> None:
        count = num_tokens if self._head.spec.layers else num_logits
        if count > self.extension.largest:
            self._extend_over(count, self._sizes.rows, count)
        elif count:
            self.extension.run(count)

    def _extend_all(self, size: int) -> None:
        entries = min(size, self._sizes.rows)
        self._extend_over(size, entries, self._passes.max_query_len(size))

    def _extend_over(self, size: int, num_entries: int, max_query_len: int) -> None:
        """Over all tokens of the pass: each has a slot to write."""
        passes, few = self._passes, self._tile_tokens
        features = passes.features
        assert features is not None
        entries = passes.plan.entries[:, :num_entries]
        tiles = self._tiles[: self._num_tiles(size, num_entries)]
        many = self._head.tile_tokens(max_query_len)
        many -= many % max(few, 1)
        next_ids, positions = self._next_ids[:size], passes.buffers.positions[:size]
        text, totals = self._rows.text, passes.plan.totals
        lay_out_successors(entries, totals, text, positions, next_ids, tiles, few, many)
        places = many // few if many > few else 0
        laid_out = replace(passes.buffers.first(size, 0, 0), tiles=tiles)
        batch = laid_out.batch(self._rows.target_tables, max_query_len, self._sizes.max_len, places)
        states = self._head.extend(features[:size], next_ids, batch, self._kv)
        tokens = passes.buffers.logit_tokens
        keep_states(entries, passes.outcomes, states, self._runner.states, tokens)

    def _extend_some(self, size: int) -> None:
        """Over the sampled tokens only: the head keeps nothing of others."""
        passes, next_ids = self._passes, self._next_ids[:size]
        buffers = passes.buffers.first(size, 0, size)
        lay_out_predicted(buffers.logit_rows, buffers.logit_positions, self._rows.text, next_ids)
        batch = buffers.batch(self._rows.target_tables, 1, self._sizes.max_len)
        states = self._head.extend(passes.hidden[:size], next_ids, batch, None)
        keep_states(passes.plan.entries, passes.outcomes, states, self._runner.states)

    def _num_tiles(self, num_tokens: int, num_entries: int) -> int:
        few = self._tile_tokens
        return num_tile_places(num_tokens, num_entries, few) if few else 0

    # -- rounds ------------------------------------------------------------------------------

    def draft(self, counts: Sequence[int]) -> None:
        self.rounds.draft(counts)

    def lay_out(self, num_rows: int, level: int | Tensor) -> PassBuffers:
        """A draft token has the position of the token before it: it completes that slot."""
        buffers = self._buffers.first(num_rows, num_rows, num_rows)
        lay_out_draft(
            self._plan.entries[:, :num_rows],
            self._plan.totals,
            self._rows.text,
            self._rows.target_tables,
            buffers,
            self._runner.target.kv.block_size,
            max(self._tile_tokens, 1),
            level,
            num_committed=0,
            num_before=1,
        )
        return buffers

    def logits(self, buffers: PassBuffers, level: int | Tensor) -> Tensor:
        assert isinstance(level, int)
        num_rows = buffers.ids.shape[0]
        state = self._drafted[:num_rows]
        if level:
            batch = buffers.batch(self._rows.target_tables, 1, self._sizes.max_len)
            new_state = self._head.step(state, buffers.ids, level, batch, self._kv)
            if new_state is not state:
                state.copy_(new_state)
        else:
            entries = self._plan.entries[:, :num_rows]
            take_states(entries, self._plan.totals, self._runner.states, state)
        return self._runner.logits(state, level)
