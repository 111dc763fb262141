"""Target and draft on one GPU: a step is enqueued whole, and its outcome read a step later.

Plans come from the host, texts stay on the device. What the recorded passes cannot do (a request
with log-probabilities, bad words of several tokens, prompt look-up, rejection sampling) is done by
the workers of other devices, on the host's copy of the texts; the device is told the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from outrider.kernels.gpu.accept import OutcomeColumn
from outrider.scheduler.proposers import own_guesses_kept
from outrider.scheduler.types import (
    DraftEvent,
    Outcome,
    PendingVerdict,
    RowInit,
    RowVerdict,
    StepPlan,
    Ticket,
    Verdict,
)
from outrider.workers.gpu.adjustments import RowAdjustment, fits_table
from outrider.workers.gpu.passes import TargetPasses
from outrider.workers.gpu.plan_buffers import StepPlanBuffers, StepSizes
from outrider.workers.gpu.proposing import DeviceContext
from outrider.workers.gpu.readback import Readback
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.base import Proposers
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.proposers.registry import ProposerEntry
from outrider.workers.recorded.recording import RecordedPasses
from outrider.workers.rows import RowTable
from outrider.workers.runner import Chunk
from outrider.workers.sampling.rows import RowSampler
from outrider.workers.target import TargetWorker

_BASE_LEN, _NUM_ACCEPTED = OutcomeColumn.BASE_LEN, OutcomeColumn.NUM_ACCEPTED
_TOKENS = OutcomeColumn.TOKENS


class ColocatedWorker:
    """Proposes and verifies on one device; see `outrider.engine.step`."""

    def __init__(
        self,
        rows: RowTable,
        target: TargetWorker,
        draft: DraftProposer | None,
        proposers: Proposers,
        on_device: Iterable[ProposerEntry],
        sizes: StepSizes,
        is_shared_noise: bool,
    ) -> None:
        """`proposers` draft from the host's texts, in steps that run there; those in `on_device`
        in all others."""
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
        building = [
            (entry.traits.name, entry.build_on_device)
            for entry in on_device
            if entry.build_on_device is not None and sizes.depth
        ]
        self._plan = StepPlanBuffers(sizes.rows, len(building), self._device)
        self._passes = TargetPasses(runner, self._state, self._plan.target, sizes)
        draft_runner = None if draft is None else draft.runner
        self._device_proposers = {
            name: build(DeviceContext(self._state, entries, sizes, draft_runner))
            for (name, build), entries in zip(building, self._plan.drafting, strict=True)
        }
        self._is_recordable = [False] * sizes.rows
        self._pending: deque[PendingVerdict] = deque()
        self._is_on_device = False  # the step under way

    # -- the step ---------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """On a GPU the next step is enqueued while this one runs."""
        return int(self._device.type == "cuda")

    @property
    def max_depth(self) -> int | None:
        return self._sizes.depth

    def events(self) -> Sequence[DraftEvent]:
        """Both models live as long as this process."""
        return ()

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        raise AssertionError("nobody joined")

    def needs_verdicts(self, plan: StepPlan) -> bool:
        """The device knows every text; a step on the host waits for it by itself."""
        return False

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
            return self._verify_on_host(plan, ticket)
        outcomes = Readback(self._passes.outcomes)
        drafting, totals = self._upload(plan)
        for proposer, num_rows in zip(self._device_proposers.values(), drafting, strict=True):
            if num_rows:
                proposer.draft(num_rows)
        outcomes.mark_drafted()
        self._passes.run(*totals)
        outcomes.enqueue(len(plan.rows))
        pending = PendingVerdict(lambda: self._settle(plan, outcomes))
        while self._pending and self._pending[0].is_known:
            self._pending.popleft()
        self._pending.append(pending)
        return pending

    def _verify_on_host(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        """The next step may be enqueued before this one is applied, so the device is told now."""
        verdict = self._target.verify(plan, ticket)
        self._proposers.observe(verdict)
        self._tell_device(verdict)
        return verdict

    def observe(self, verdict: Verdict) -> None:
        """What there was to learn was learned when the step ran."""

    def record(self, on_size: Callable[[], None]) -> None:
        """Record every pass; `on_size` is called after each of `num_recordings`."""
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for passes in self._recordings():
            passes.record(pool, on_size)

    @property
    def num_recordings(self) -> int:
        return sum(len(passes.sizes) for passes in self._recordings())

    def _recordings(self) -> Sequence[RecordedPasses]:
        drafting = [each for own in self._device_proposers.values() for each in own.recordings]
        return [self._passes.body, self._passes.head, *drafting]

    # -- what can run as recorded ------------------------------------------------------------

    def _can_run(self, plan: StepPlan) -> bool:
        return all(
            self._is_recordable[row.row]
            and (not row.depth or row.proposer in self._device_proposers)
            for row in plan.rows
        )

    def _begin(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        self._target.begin(plan)
        self._proposers.follow(plan)
        for init in plan.admitted:
            sampler = self._target.samplers[init.row]
            is_recordable = self._can_record(init, sampler)
            self._is_recordable[init.row] = is_recordable
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
        """Prompts, and what a row fell behind by, go through the draft before it guesses. They are
        applied text, which the host has."""
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
        if chunks:
            self._draft.runner.forward(chunks)

    def _upload(self, plan: StepPlan) -> tuple[list[int], tuple[int, int, int]]:
        """The plan as the device reads it; how many rows each proposer drafts for, and the totals
        of the pass."""
        total = sum(row.pass_tokens for row in plan.rows)
        tile_tokens = self._passes.tile_tokens(total)
        computed = self._target.computed
        entries: list[tuple[int, ...]] = []
        drafting: dict[str, list[tuple[int, ...]]] = {name: [] for name in self._device_proposers}
        first = tile = logit = 0
        for row in plan.rows:
            number, count = row.row, row.pass_tokens
            start = -1  # its last token, wherever the text has got by then
            if self._is_prompt(number):
                start = computed[number]
                computed[number] = start + row.num_tokens
            verified = row.num_verified if row.samples else -1
            entries.append((number, count, start, verified, first, tile, logit))
            if row.depth:
                drafting[row.proposer].append((number, 0, 0, row.depth, 0, 0, 0))
            first += count
            tile += -(-count // tile_tokens)
            logit += verified + 1
        self._plan.fill(entries, list(drafting.values()), (first, tile, logit))
        return [len(rows) for rows in drafting.values()], (first, tile, logit)

    def _is_prompt(self, row: int) -> bool:
        """Text that the row came with, and which the host therefore knows, is still to compute."""
        return self._target.computed[row] < len(self._rows[row].init.token_ids)

    # -- outcomes ----------------------------------------------------------------------------

    def _settle(self, plan: StepPlan, outcomes: Readback) -> Verdict:
        """The verdict of a step that ran on the device; the host's texts follow it."""
        found = outcomes.rows()
        rows = []
        for row, outcome in zip(plan.rows, found, strict=True):
            if not row.samples:
                base_len = len(self._rows[row.row].tokens)
                rows.append(RowVerdict(row.row, row.generation, base_len, 0, 0, 0, ()))
                continue
            base_len, accepted = outcome[_BASE_LEN], outcome[_NUM_ACCEPTED]
            tokens = tuple(outcome[_TOKENS : _TOKENS + accepted + 1])
            reach, verified = row.depth, row.num_verified
            rows.append(
                RowVerdict(row.row, row.generation, base_len, reach, verified, accepted, tokens)
            )
            self._target.computed[row.row] = base_len + accepted
            if row.draft_tokens and reach and self._draft is not None:
                kept = own_guesses_kept(reach, accepted)
                self._draft.computed[row.row] = base_len + kept
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
