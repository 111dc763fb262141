"""The draft computes text that it has not seen: prompts, and what was written without it.

A row that catches up is not drafted for in the same step, so this runs behind the step's outcome,
and nobody who waits for a token waits for it. The text is in the device's tables and goes through a
recorded pass, which also says what the draft would have guessed of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.kernels.gpu.agreement import settle_catch_up
from outrider.kernels.gpu.layout import PassBuffers, lay_out_target
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.scheduler.types import Agreement, RowPlan, StepPlan, Verdict
from outrider.workers.gpu.plan_buffers import PassEntries, PassShare, StepSizes
from outrider.workers.gpu.readback import Mark, copied_to_host, mark, seconds_between
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.recorded.recording import RecordedPasses, kernels_of
from outrider.workers.rows import RowTable
from outrider.workers.runner import Chunk, Runner
from outrider.workers.sampling.rows import RowSampler

_ROW_TOKENS = 32
"""Output of a row, the most that a plan has it catch up on at a time; more is right as well."""
_PASS_SIZES = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
_MOST_GUESSES = 512


@dataclass(frozen=True, slots=True)
class _Guessed:
    """Where in a pass the guesses for one row's output are."""

    row: int
    generation: int
    first: int
    count: int

    def agreement(self, hits: Sequence[int]) -> Agreement:
        own = hits[self.first : self.first + self.count]
        return Agreement(self.row, self.generation, tuple(hit == 1 for hit in own if hit >= 0))


@dataclass(slots=True)
class CatchUpWork:
    """What the draft catches up on in one step."""

    chunks: list[Chunk] = field(default_factory=list)  # what it has no room for
    share: PassShare = field(default_factory=PassShare)  # in the recorded pass
    guessed: list[_Guessed] = field(default_factory=list)


class Tail:
    """Catching up behind the outcome of a step, whose verdict does not wait for it: a later one
    tells of it, when it has long ended. Made once all of it is enqueued."""

    def __init__(self, begin: Mark, guessed: list[_Guessed], hits: Tensor) -> None:
        self._guessed, self._hits = guessed, copied_to_host(hits)
        self._begin, self._end = begin, mark(hits.device)

    def seconds(self) -> float:
        self._end.synchronize()
        return seconds_between(self._begin, self._end)

    def agreements(self) -> list[Agreement]:
        self._end.synchronize()
        hits = self._hits.tolist()
        found = [guessed.agreement(hits) for guessed in self._guessed]
        return [each for each in found if each.hits]


def with_tails(verdict: Verdict, tails: Sequence[Tail]) -> Verdict:
    """The verdict of a step enqueued behind `tails`; tells of them as well."""
    if not tails:
        return verdict
    return replace(
        verdict,
        draft_s=verdict.draft_s + sum(tail.seconds() for tail in tails),
        agreements=tuple(each for tail in tails for each in tail.agreements()),
    )


class CatchUpPasses:
    """The recorded pass: a few tokens each of many rows, and what the draft would have guessed
    behind them."""

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
        self.most_guesses = min(_MOST_GUESSES, tokens)
        device = runner.device
        self._buffers = PassBuffers.create(tokens, tokens, self.most_guesses, device)
        self._chosen = torch.zeros(self.most_guesses, dtype=torch.int32, device=device)
        self.hits = torch.zeros_like(self._chosen)
        kernels = kernels_of(self._decoder.spec.num_layers)
        recorded = [size for size in _PASS_SIZES if size < tokens] + [tokens]
        self.recorded = RecordedPasses(self._run, recorded, device, kernels)

    def _run(self, size: int) -> None:
        num_entries = min(size, self._sizes.rows)
        num_tiles = min(num_entries + size // self.tile_tokens, size)
        num_guesses = min(size, self.most_guesses)
        buffers = self._buffers.first(size, num_tiles, num_guesses)
        plan, tables, text = self._plan, self._rows.draft_tables, self._rows.text
        entries = plan.entries[:, :num_entries]
        lay_out_target(
            entries, plan.totals, text, tables, buffers, self._kv.block_size, self.tile_tokens
        )
        batch = buffers.batch(tables, _ROW_TOKENS, self._sizes.max_len)
        ids = self._runner.known_ids(buffers.ids)
        hidden = self._decoder.forward_some(ids, batch, self._kv, buffers.logit_tokens)
        logits = self._decoder.logits(hidden)[:, : self._runner.vocab_size]
        chosen = self._chosen[:num_guesses]
        rows, positions = buffers.logit_rows, buffers.logit_positions
        choose_tokens(logits, self._rows.settings, rows, positions, chosen)
        settle_catch_up(entries, plan.totals, chosen, text, self.hits)


class CatchUp:
    """What rows lag behind by, enqueued step by step."""

    def __init__(
        self,
        rows: RowTable,
        samplers: Mapping[int, RowSampler],
        state: DeviceRows,
        draft: DraftProposer,
        passes: CatchUpPasses,
        is_shared_noise: bool,
    ) -> None:
        self._rows = rows
        self._samplers = samplers
        self._state = state
        self._draft = draft
        self._passes = passes
        self._is_shared_noise = is_shared_noise
        self._untold: list[Tail] = []

    @property
    def recorded(self) -> RecordedPasses:
        return self._passes.recorded

    def plan(self, plan: StepPlan) -> CatchUpWork:
        """What the plan's rows are to catch up on. It is applied text, which the host has."""
        work = CatchUpWork(share=PassShare(self._passes.tile_tokens))
        for row in plan.rows:
            if row.draft_tokens and not row.depth:
                self._add(work, row)
        return work

    def enqueue(self, work: CatchUpWork) -> None:
        """Its share of the recorded pass has been copied in."""
        if not work.chunks and not work.share.entries:
            return
        begin = mark(self._draft.runner.device)
        if work.chunks:
            self._draft.runner.forward(work.chunks)
            for row, start, tokens in work.chunks:
                self._state.set_draft_computed(row, start + len(tokens))
        if work.share.entries:
            self._passes.recorded.run(work.share.num_tokens)
        hits = self._passes.hits[: work.share.num_logits]
        self._untold.append(Tail(begin, work.guessed, hits))

    def take_tails(self) -> list[Tail]:
        """Those no verdict has told of yet. They end before whatever is enqueued from now on."""
        tails, self._untold = self._untold, []
        return tails

    def _add(self, work: CatchUpWork, planned: RowPlan) -> None:
        number, share = planned.row, work.share
        row, start = self._rows[number], self._draft.computed[number]
        end = min(start + planned.draft_tokens, len(row.tokens))
        if end <= start:
            return
        self._draft.computed[number] = end
        passes, output = self._passes, max(start, row.init.prompt_len)
        num_guesses = max(end - output, 0) if self._shows_agreement(number) else 0
        if (
            share.num_tokens + end - start > passes.recorded.largest
            or share.num_logits + num_guesses > passes.most_guesses
        ):  # more than a plan should ask for
            work.chunks.append(Chunk(number, start, row.tokens[start:end]))
            return
        if num_guesses:
            first = share.num_logits
            work.guessed.append(_Guessed(number, planned.generation, first, num_guesses))
        share.add(number, start, end - start, num_guesses - 1)

    def _shows_agreement(self, row: int) -> bool:
        """Penalties count the whole text, not the part up to a position; and where noise is not
        shared a guess has nothing to do with the text."""
        sampler = self._samplers[row]
        return not sampler.changes_logits and (self._is_shared_noise or sampler.is_greedy)
