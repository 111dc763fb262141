"""Target and draft on one GPU: a step is enqueued whole, and its outcome read a step later.

Plans come from the host, texts stay on the device. What the recorded passes cannot do (a request
with log-probabilities, bad words of several tokens, prompt look-up, rejection sampling) is done by
the workers of other devices, on the host's copy of the texts; the device is told the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from outrider.kernels.gpu.accept import OutcomeColumn
from outrider.kernels.gpu.layout import FIRST_TOKENS
from outrider.scheduler.types import (
    Outcome,
    ProposerKind,
    RowInit,
    RowPlan,
    RowVerdict,
    StepPlan,
    Verdict,
)
from outrider.workers.gpu.adjustments import RowAdjustment, fits_table
from outrider.workers.gpu.passes import (
    MAX_BEHIND,
    DraftPasses,
    StepPlanBuffers,
    StepSizes,
    TargetPasses,
)
from outrider.workers.gpu.readback import Readback
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.base import Proposers, Ticket
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.recorded.recording import RecordedPasses
from outrider.workers.rows import RowTable
from outrider.workers.runner import Chunk
from outrider.workers.sampling.rows import RowSampler
from outrider.workers.target import TargetWorker

_BASE_LEN, _NUM_ACCEPTED = OutcomeColumn.BASE_LEN, OutcomeColumn.NUM_ACCEPTED
_TOKENS = OutcomeColumn.TOKENS


class PendingVerdict:
    """The outcome of a step under way; `wait` returns once the device has written it."""

    def __init__(self, read: Callable[[], Verdict]) -> None:
        self._read: Callable[[], Verdict] | None = read
        self._verdict: Verdict | None = None

    @property
    def is_known(self) -> bool:
        return self._verdict is not None

    def wait(self) -> Verdict:
        if self._read is not None:
            self._verdict = self._read()
            self._read = None  # and with it the memory the device wrote to
        assert self._verdict is not None
        return self._verdict


class ColocatedWorker:
    """Proposes and verifies on one device; see `outrider.engine.step`."""

    def __init__(
        self,
        rows: RowTable,
        target: TargetWorker,
        draft: DraftProposer | None,
        proposers: Proposers,
        sizes: StepSizes,
        is_shared_noise: bool,
    ) -> None:
        self._rows = rows
        self._target = target
        self._draft = draft
        self._proposers = proposers
        self._sizes = sizes
        self._is_shared_noise = is_shared_noise
        runner = target.runner
        self._device = runner.device
        self._state = DeviceRows(
            sizes.rows,
            sizes.max_len,
            sizes.depth,
            runner.kv.block_size,
            runner.vocab_size,
            self._device,
        )
        self._plan = StepPlanBuffers(sizes.rows, self._device)
        self._passes = TargetPasses(runner, self._state, self._plan, sizes)
        self._drafting = (
            DraftPasses(draft.runner, self._state, self._plan, sizes)
            if draft is not None and sizes.depth
            else None
        )
        self._is_recordable = [False] * sizes.rows
        self._behind = [0] * sizes.rows  # at most so many tokens the draft has not seen
        self._pending: deque[PendingVerdict] = deque()
        self._is_on_device = False  # the step under way

    # -- the step ---------------------------------------------------------------------------

    def sync(self, scheduler: object) -> None:
        """Both models live as long as this process."""

    def propose(self, plan: StepPlan) -> Ticket:
        self._begin(plan)
        self._is_on_device = self._can_run(plan)
        if not self._is_on_device:
            self._drain()
            self._extend_tables(plan)
            return self._proposers.propose(plan)
        self._extend_tables(plan)
        self._prefill_draft(plan)
        return Ticket(plan.step)

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome:
        if not self._is_on_device:
            return self._target.verify(plan, ticket)
        outcomes = Readback(self._passes.outcomes)
        drafting, totals = self._upload(plan)
        if drafting and self._drafting is not None:
            if any(row.depth and self._behind[row.row] > FIRST_TOKENS for row in plan.rows):
                self._drafting.catch_up(drafting)
            self._drafting.round.run(drafting)
        outcomes.mark_drafted()
        self._passes.run(*totals)
        outcomes.enqueue(len(plan.rows))
        pending = PendingVerdict(lambda: self._settle(plan, outcomes))
        while self._pending and self._pending[0].is_known:
            self._pending.popleft()
        self._pending.append(pending)
        self._look_ahead(plan)
        return pending

    def observe(self, outcome: Outcome) -> None:
        """After a step on the host: its proposers learn from it, and the device is told."""
        if not self._is_on_device:
            self._proposers.observe(outcome)
            self._tell_device(outcome.wait())

    def record(self, on_size: Callable[[], None]) -> None:
        """Record every pass; `on_size` is called after each of `num_recordings`."""
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for passes in self._recordings():
            passes.record(pool, on_size)

    @property
    def num_recordings(self) -> int:
        return sum(len(passes.sizes) for passes in self._recordings())

    def _recordings(self) -> Sequence[RecordedPasses]:
        drafting = [] if self._drafting is None else [self._drafting.round]
        return [self._passes.body, self._passes.head, *drafting]

    # -- what can run as recorded ------------------------------------------------------------

    def _can_run(self, plan: StepPlan) -> bool:
        drafting, is_behind = 0, False
        for row in plan.rows:
            if not self._is_recordable[row.row]:
                return False
            if row.depth:
                if row.proposer is not ProposerKind.DRAFT or row.depth > self._sizes.depth:
                    return False
                if self._behind[row.row] > MAX_BEHIND:
                    return False
                drafting += 1
                is_behind |= self._behind[row.row] > FIRST_TOKENS
            elif row.draft_tokens and not self._knows_text(row):
                return False
        # Catching up must take no more memory than the largest pass, which was measured.
        return not is_behind or MAX_BEHIND * drafting <= self._sizes.tokens

    def _knows_text(self, row: RowPlan) -> bool:
        """Whether what the draft shall catch up on is prompt, which the host has."""
        assert self._draft is not None
        end = self._draft.computed[row.row] + row.draft_tokens
        return end <= len(self._rows[row.row].init.token_ids)

    def _begin(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        self._target.begin(plan)
        if self._draft is not None:
            self._draft.follow(plan)
        for init in plan.admitted:
            sampler = self._target.samplers[init.row]
            is_recordable = self._can_record(init, sampler)
            self._is_recordable[init.row] = is_recordable
            self._behind[init.row] = len(init.token_ids)
            self._state.set_text(init.row, init.token_ids, init.draft_cached)
            self._state.set_sampling(init.row, sampler)
            is_adjusted = is_recordable and sampler.changes_logits
            adjustment = RowAdjustment.of(sampler, init.token_ids) if is_adjusted else None
            self._state.set_adjustment(init.row, adjustment)

    def _can_record(self, init: RowInit, sampler: RowSampler) -> bool:
        params = init.params
        return (
            (not sampler.changes_logits or fits_table(init, self._sizes.max_len))
            and params.logprobs is None
            and params.prompt_logprobs is None
            and (self._is_shared_noise or sampler.is_greedy)
        )

    # -- enqueueing --------------------------------------------------------------------------

    def _extend_tables(self, plan: StepPlan) -> None:
        """The device's tables, and the host's, which a step that runs there goes by."""
        for row in plan.rows:
            if row.target_blocks:
                self._target.runner.extend_table(row.row, row.target_start, row.target_blocks)
                self._state.extend_target_table(row.row, row.target_start, row.target_blocks)
            if row.draft_blocks and self._draft is not None:
                self._draft.runner.extend_table(row.row, row.draft_start, row.draft_blocks)
                self._state.extend_draft_table(row.row, row.draft_start, row.draft_blocks)
        self._state.flush_tables()

    def _prefill_draft(self, plan: StepPlan) -> None:
        """Prompts go through the draft too, before it has anything to guess."""
        if self._draft is None:
            return
        chunks = []
        for row in plan.rows:
            if row.depth or not row.draft_tokens:
                continue
            tokens, start = self._rows[row.row].tokens, self._draft.computed[row.row]
            end = min(start + row.draft_tokens, len(tokens))
            if end > start:
                chunks.append(Chunk(row.row, start, tokens[start:end]))
                self._draft.computed[row.row] = end
                self._state.set_draft_computed(row.row, end)
            self._behind[row.row] = len(tokens) - end
        if chunks:
            self._draft.runner.forward(chunks)

    def _upload(self, plan: StepPlan) -> tuple[int, tuple[int, int, int]]:
        """The plan as the device reads it; how many rows draft, and the totals of the pass."""
        total = sum(row.num_tokens + row.depth for row in plan.rows)
        tile_tokens = self._passes.tile_tokens(total)
        computed = self._target.computed
        entries: list[tuple[int, ...]] = []
        drafting: list[tuple[int, ...]] = []
        first = tile = logit = 0
        for row in plan.rows:
            number, count = row.row, row.num_tokens + row.depth
            start = -1  # its last token, wherever the text has got by then
            if self._is_prompt(number):
                start = computed[number]
                computed[number] = start + row.num_tokens
            depth = row.depth if row.samples else -1
            entries.append((number, count, start, depth, first, tile, logit))
            if row.depth:
                drafting.append((number, 0, 0, row.depth, 0, 0, 0))
            first += count
            tile += -(-count // tile_tokens)
            logit += depth + 1
        self._plan.fill(entries, drafting, (first, tile, logit))
        return len(drafting), (first, tile, logit)

    def _is_prompt(self, row: int) -> bool:
        """Text that the row came with, and which the host therefore knows, is still to compute."""
        return self._target.computed[row] < len(self._rows[row].init.token_ids)

    def _look_ahead(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.depth:
                self._behind[row.row] = FIRST_TOKENS
            elif row.samples:
                self._behind[row.row] += 1

    # -- outcomes ----------------------------------------------------------------------------

    def _settle(self, plan: StepPlan, outcomes: Readback) -> Verdict:
        """The verdict of a step that ran on the device; the host's texts follow it."""
        found = outcomes.rows()
        rows = []
        for row, outcome in zip(plan.rows, found, strict=True):
            if not row.samples:
                base_len = len(self._rows[row.row].tokens)
                rows.append(RowVerdict(row.row, row.generation, base_len, 0, 0, ()))
                continue
            base_len, accepted = outcome[_BASE_LEN], outcome[_NUM_ACCEPTED]
            tokens = tuple(outcome[_TOKENS : _TOKENS + accepted + 1])
            rows.append(RowVerdict(row.row, row.generation, base_len, row.depth, accepted, tokens))
            self._target.computed[row.row] = base_len + accepted
            if row.depth and self._draft is not None:
                self._draft.computed[row.row] = base_len + min(accepted, row.depth - 1)
        verdict = Verdict(plan.epoch, plan.step, tuple(rows), *outcomes.seconds())
        self._rows.commit(verdict)
        return verdict

    def _drain(self) -> None:
        """Wait for the steps under way, so that the host knows every text."""
        while self._pending:
            self._pending.popleft().wait()

    def _tell_device(self, verdict: Verdict) -> None:
        """The device's texts follow a step that ran on the host."""
        for row in verdict.rows:
            number = row.row
            computed = 0 if self._draft is None else self._draft.computed[number]
            self._state.extend_text(number, row.base_len, row.tokens, computed)
            self._behind[number] = row.base_len + len(row.tokens) - computed
