"""A head on the target's hidden states, as passes on the device.

It goes over passes of the target, all of those that have a row it may draft for, and does so behind
the step's outcome: nobody who waits for a token waits for it. What it remembers of each row it
leaves in a table that steps on the host share (`HeadRunner.states`). A round drafts from there; the
first draft takes no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.gpu.heading import (
    keep_states,
    lay_out_predicted,
    lay_out_successors,
    num_tile_places,
    take_states,
)
from outrider.kernels.gpu.layout import PassBuffers, lay_out_draft
from outrider.scheduler.types import Verdict
from outrider.workers.gpu.drafting import DraftRounds
from outrider.workers.gpu.passes import TargetPasses
from outrider.workers.gpu.plan_buffers import PassEntries, StepSizes
from outrider.workers.gpu.readback import Mark, mark, seconds_between
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.recorded.recording import RecordedPasses, kernels_of, row_sizes

_KERNELS = kernels_of(1)


class Extension(NamedTuple):
    """When the head went over a pass, which no verdict has told of yet."""

    begin: Mark
    end: Mark


def with_extensions(verdict: Verdict, extensions: Sequence[Extension]) -> Verdict:
    """The verdict of a step enqueued behind `extensions`. Their passes cannot do without, so their
    time is that of verification."""
    if not extensions:
        return verdict
    for each in extensions:
        each.end.synchronize()
    spent_s = sum(seconds_between(*each) for each in extensions)
    return replace(verdict, verify_s=verdict.verify_s + spent_s)


class HeadPasses:
    """A head beside the target: goes over its passes, and drafts in rounds."""

    are_levels_alike = False  # a head may have weights for each

    def __init__(
        self,
        runner: HeadRunner,
        passes: TargetPasses,
        rows: DeviceRows,
        plan: PassEntries,
        sizes: StepSizes,
    ) -> None:
        head, device = runner.head, runner.device
        if head.spec.keeps_kv and not head.spec.layers:
            raise ModelError(
                f"this {head.spec.kind} head attends to hidden states behind the target's last "
                "norm, which are there for a few tokens of a pass only; run it on a CPU."
            )
        self._runner = runner
        self._head, self._kv = head, runner.kv
        self._passes = passes
        self._rows = rows
        self._plan = plan
        self._sizes = sizes
        self._tile_tokens = head.tile_tokens(sizes.depth + 1)  # of rows that decode; 0: no tiles
        self._buffers = PassBuffers.create(sizes.rows, sizes.rows, sizes.rows, device)
        self._drafted = torch.zeros_like(runner.states)  # behind the drafts of a round so far
        reads_all = bool(head.spec.layers)
        num_slots = sizes.tokens if reads_all else sizes.logits
        self._next_ids = torch.zeros(num_slots, dtype=torch.int32, device=device)
        num_tiles = self._num_tiles(sizes.tokens, sizes.rows)
        self._tiles = torch.zeros(num_tiles, 4, dtype=torch.int32, device=device)
        self.extension = (
            RecordedPasses(self._extend_all, passes.body.sizes, device, _KERNELS)
            if reads_all
            else RecordedPasses(self._extend_some, row_sizes(sizes.logits), device, _KERNELS)
        )
        most = sizes.depth if head.spec.max_depth is None else head.spec.max_depth
        own_sizes = replace(sizes, depth=min(most, sizes.depth))
        self.rounds = DraftRounds(self, rows, own_sizes, _KERNELS, device)
        self._untold: list[Extension] = []

    @property
    def recordings(self) -> Sequence[RecordedPasses]:
        return [self.extension, *self.rounds.recordings]

    def begin(self, row: int) -> None:
        """A row is drafted for behind its first token, whose step leaves a state of its own."""

    # -- behind a pass -----------------------------------------------------------------------

    def follow(self, num_tokens: int, num_logits: int) -> None:
        """Behind the pass over so much, and what was accepted of it."""
        begin = mark(self._runner.device)
        self.extend(num_tokens, num_logits)
        self._untold.append(Extension(begin, mark(self._runner.device)))

    def take_extensions(self) -> list[Extension]:
        """Those no verdict has told of yet. They end before whatever is enqueued from now on."""
        taken, self._untold = self._untold, []
        return taken

    @torch.inference_mode()
    def extend(self, num_tokens: int, num_logits: int) -> None:
        wanted = num_tokens if self._head.spec.layers else num_logits
        if wanted > self.extension.largest:
            self._extend_over(wanted, self._sizes.rows, wanted)
        elif wanted:
            self.extension.run(wanted)

    def _extend_all(self, size: int) -> None:
        entries = min(size, self._sizes.rows)
        self._extend_over(size, entries, self._passes.max_query_len(size))

    def _extend_over(self, size: int, num_entries: int, max_query_len: int) -> None:
        """All tokens of the pass: each has a slot that is to be written."""
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
        """The tokens that predict: of others nothing is kept."""
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
        """A draft stands where the token before it does: that slot is what it completes."""
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
            going_on = self._head.step(state, buffers.ids, level, batch, self._kv)
            if going_on is not state:
                state.copy_(going_on)
        else:
            entries = self._plan.entries[:, :num_rows]
            take_states(entries, self._plan.totals, self._runner.states, state)
        return self._runner.logits(state, level)


def head_passes(proposers: Sequence[object]) -> HeadPasses | None:
    """The one among them, if there is a head."""
    return next((each for each in proposers if isinstance(each, HeadPasses)), None)
