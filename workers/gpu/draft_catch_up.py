"""Draft catch-up: the draft model computes KV that it lacks, of prompts and undrafted output.

A row does not draft in the step in which it catches up, so this runs after the step's outcome is
enqueued and delays no token. The text is in the device's tables; a captured pass computes it and
also replays acceptance: what the draft would have guessed of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.kernels.gpu.agreement import settle_catch_up
from outrider.kernels.gpu.layout import PassBuffers, lay_out_target
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.scheduler.types import Agreement, RowPlan, StepPlan, Verdict
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses, kernels_of
from outrider.workers.gpu.plan_buffers import PassEntries, PassShare, StepSizes
from outrider.workers.gpu.proposing import DeviceContext
from outrider.workers.gpu.readback import StreamEvent, copied_to_host, record_event, seconds_between
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.runner import RowChunk, Runner

_ROW_TOKENS = 32
"""The most output tokens of a row that a plan has caught up on at a time; more would work too."""
_PASS_SIZES = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
_MAX_GUESSES = 512


@dataclass(frozen=True, slots=True)
class _ReplayedRow:
    """Where the guesses for one row's output are in the pass."""

    row: int
    generation: int
    first: int
    count: int

    def agreement(self, hits: Sequence[int]) -> Agreement:
        own = hits[self.first : self.first + self.count]
        return Agreement(self.row, self.generation, tuple(hit == 1 for hit in own if hit >= 0))


@dataclass(slots=True)
class CatchUpBatch:
    """The catch-up work of one step."""

    chunks: list[RowChunk] = field(default_factory=list)  # what exceeds the captured pass
    share: PassShare = field(default_factory=PassShare)  # in the captured pass
    guessed: list[_ReplayedRow] = field(default_factory=list)


class CatchUpReadback:
    """Time and replayed acceptance of a step's catch-up, created once it is enqueued."""

    def __init__(self, begin: StreamEvent, guessed: list[_ReplayedRow], hits: Tensor) -> None:
        self._guessed, self._hits = guessed, copied_to_host(hits)
        self._begin, self._end = begin, record_event(hits.device)

    def wait(self) -> tuple[float, tuple[Agreement, ...]]:
        """Its time, and what the draft would have guessed."""
        self._end.synchronize()
        hits = self._hits.tolist()
        found = [guessed.agreement(hits) for guessed in self._guessed]
        agreements = tuple(each for each in found if each.hits)
        return seconds_between(self._begin, self._end), agreements

    def added_to(self, verdict: Verdict) -> Verdict:
        seconds, agreements = self.wait()
        return replace(
            verdict,
            draft_s=verdict.draft_s + seconds,
            agreements=(*verdict.agreements, *agreements),
        )


class CatchUpPasses:
    """The captured pass: a few tokens each of many rows, and the draft's guesses after them."""

    def __init__(
        self, runner: Runner, rows: DeviceRows, plan: PassEntries, sizes: StepSizes
    ) -> None:
        self._runner = runner
        self._decoder, self._kv = runner.decoder, runner.kv
        self._rows = rows
        self._plan = plan
        self._sizes = sizes
        self.tile_tokens = self._decoder.tile_tokens(_ROW_TOKENS)
        tokens = min(_PASS_SIZES[-1], max(sizes.tokens, sizes.rows * _ROW_TOKENS))
        self.max_guesses = min(_MAX_GUESSES, tokens)
        device = runner.device
        self._buffers = PassBuffers.create(tokens, tokens, self.max_guesses, device)
        self._chosen = torch.zeros(self.max_guesses, dtype=torch.int32, device=device)
        self.hits = torch.zeros_like(self._chosen)
        kernels = kernels_of(self._decoder.spec.num_layers)
        captured_sizes = [size for size in _PASS_SIZES if size < tokens] + [tokens]
        self.captured = CapturedPasses(self._run, captured_sizes, device, kernels)

    def _run(self, size: int) -> None:
        num_entries = min(size, self._sizes.rows)
        num_tiles = min(num_entries + size // self.tile_tokens, size)
        num_guesses = min(size, self.max_guesses)
        buffers = self._buffers.first(size, num_tiles, num_guesses)
        plan, tables, text = self._plan, self._rows.draft_tables, self._rows.text
        entries = plan.entries[:, :num_entries]
        lay_out_target(
            entries, plan.totals, text, tables, buffers, self._kv.block_size, self.tile_tokens
        )
        batch = buffers.batch(tables, _ROW_TOKENS, self._sizes.max_len)
        ids = self._runner.known_ids(buffers.ids)
        hidden = self._decoder.forward_some(ids, batch, self._kv, buffers.logit_tokens)
        logits = self._runner.whole_logits(hidden)
        chosen = self._chosen[:num_guesses]
        rows, positions = buffers.logit_rows, buffers.logit_positions
        choose_tokens(logits, self._rows.settings, rows, positions, chosen)
        settle_catch_up(entries, plan.totals, chosen, text, self.hits)


class DraftCatchUp:
    """Plans and enqueues the catch-up work of each step."""

    def __init__(self, runner: Runner, context: DeviceContext) -> None:
        self._runner = runner
        self._rows = context.rows
        self._samplers = context.samplers
        self._computed = context.computed
        self._state = context.state
        self._passes = CatchUpPasses(runner, context.state, context.catch_up, context.sizes)
        self._is_shared_noise = context.verification == "shared"
        self._work = CatchUpBatch()
        self._unreported: list[CatchUpReadback] = []

    @property
    def captured(self) -> CapturedPasses:
        return self._passes.captured

    def plan(self, plan: StepPlan) -> PassShare:
        """The catch-up work of a plan: its share of the captured pass. It is committed text, which
        the host has."""
        work = self._work = CatchUpBatch(share=PassShare(self._passes.tile_tokens))
        for row in plan.rows:
            if row.draft_tokens and not row.depth:
                self._add(work, row)
        return work.share

    def enqueue(self) -> None:
        """Enqueue what was planned. Call after its share of the captured pass was copied in."""
        work, self._work = self._work, CatchUpBatch()
        if not work.chunks and not work.share.entries:
            return
        begin = record_event(self._runner.device)
        if work.chunks:
            self._runner.forward(work.chunks)
            for row, start, tokens in work.chunks:
                self._state.set_draft_computed(row, start + len(tokens))
        if work.share.entries:
            self._passes.captured.run(work.share.num_tokens)
        hits = self._passes.hits[: work.share.num_logits]
        self._unreported.append(CatchUpReadback(begin, work.guessed, hits))

    def take_results(self) -> list[CatchUpReadback]:
        results, self._unreported = self._unreported, []
        return results

    def _add(self, work: CatchUpBatch, planned: RowPlan) -> None:
        number, share = planned.row, work.share
        row, start = self._rows[number], self._computed[number]
        end = min(start + planned.draft_tokens, len(row.tokens))
        if end <= start:
            return
        self._computed[number] = end
        passes, output = self._passes, max(start, row.init.prompt_len)
        num_guesses = max(end - output, 0) if self._replays_acceptance(number) else 0
        if (
            share.num_tokens + end - start > passes.captured.largest
            or share.num_logits + num_guesses > passes.max_guesses
        ):  # more than plans usually have
            work.chunks.append(RowChunk(number, start, row.tokens[start:end]))
            return
        if num_guesses:
            first = share.num_logits
            work.guessed.append(_ReplayedRow(number, planned.generation, first, num_guesses))
        share.add(number, start, end - start, num_guesses - 1)

    def _replays_acceptance(self, row: int) -> bool:
        """Not with penalties, which count the whole text rather than the part up to a position, nor
        without shared noise, where a guess does not predict the text."""
        sampler = self._samplers[row]
        return not sampler.changes_logits and (self._is_shared_noise or sampler.is_greedy)
