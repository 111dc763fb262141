"""The device step: a target's step is enqueued whole, and its outcome read a step later.

Plans come from the host, texts stay on the device. Drafts are made on the same device or, where the
draft model is in a rank of its own, which may come after the step is enqueued. Exclusive steps, for
requests that captured passes do not support (see `outrider.workers.gpu.exclusive`), run on the
workers of other devices, with the host's copy of the texts; their results are copied to the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from outrider.scheduler.costs import StepCosts
from outrider.scheduler.types import (
    DraftEvent,
    Exclusive,
    Outcome,
    RequestSpec,
    RowInit,
    RowVerdict,
    StepPlan,
    Ticket,
    Verdict,
)
from outrider.workers.cuda_graphs.captured_passes import (
    CapturedPasses,
    capture_all,
    capture_largest,
)
from outrider.workers.gpu.costs import measure_costs
from outrider.workers.gpu.exclusive import exclusivity
from outrider.workers.gpu.logprobs import LogprobsReadback
from outrider.workers.gpu.passes import TargetPasses
from outrider.workers.gpu.plan_buffers import (
    PassShare,
    StepPlanBuffers,
    StepSizes,
    drafts_dropped,
    order_by_depth,
)
from outrider.workers.gpu.proposing import (
    DeviceContext,
    DeviceProposer,
    LateResult,
    NoDrafts,
)
from outrider.workers.gpu.readback import PinnedRing, Readback, row_verdict
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.base import ProposerContext, Proposers
from outrider.workers.proposers.registry import ProposerEntry, build_on_device
from outrider.workers.target import LocalTarget


class EnqueuedStep:
    """The outcome of a step that the device runs. `wait` extends the host's texts."""

    __slots__ = ("_outcomes", "_settle", "_verdict", "offered", "plan")

    def __init__(
        self,
        plan: StepPlan,
        outcomes: Readback,
        settle: Callable[[EnqueuedStep], Verdict],
    ) -> None:
        self.plan = plan
        # By row, the number of drafts where it is less than planned; set before the step ends.
        self.offered: Mapping[int, int] = {}
        self._outcomes = outcomes
        self._settle: Callable[[EnqueuedStep], Verdict] | None = settle
        self._verdict: Verdict | None = None

    @property
    def is_known(self) -> bool:
        return self._verdict is not None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not block."""
        return self.is_known or self._outcomes.is_done

    def records(self) -> Tensor:
        """Wait; int32, a row per row of the plan, see `OutcomeColumn`. Those of rows that do not
        sample are void."""
        return self._outcomes.records()

    def wait(self) -> Verdict:
        if self._settle is not None:
            self._verdict = self._settle(self)
            self._settle = None  # frees the buffers it holds
        assert self._verdict is not None
        return self._verdict


class DeviceStep:
    """Proposes and verifies on one device; see `outrider.engine.step`. Ranks of a tensor-parallel
    target each have one, and enqueue the same steps."""

    def __init__(
        self,
        context: ProposerContext,
        target: LocalTarget,
        proposers: Proposers,
        on_device: Sequence[ProposerEntry],
        sizes: StepSizes,
    ) -> None:
        """`proposers`, built from `context`, draft from the host's texts in exclusive steps, those
        in `on_device` in all other steps."""
        self._rows = context.rows
        self._target = target
        self._proposers = proposers
        self.sizes = sizes
        self._is_shared_noise = context.verification == "shared"
        runner = target.runner
        self.device = runner.device
        self._state = DeviceRows(
            sizes.rows,
            sizes.max_len,
            sizes.depth,
            runner.kv.block_size,
            runner.vocab_size,
            self.device,
        )
        on_device = on_device if sizes.depth else ()
        with_kv = next((each.traits for each in on_device if each.traits.keeps_kv), None)
        kv_rule = None if with_kv is None else with_kv.kv_rule
        self._plan = StepPlanBuffers(sizes.rows, len(on_device), self.device)
        self._passes = TargetPasses(runner, self._state, self._plan.target, sizes, kv_rule)
        self._host_outcomes = PinnedRing(self._passes.outcomes)
        self._device_proposers = self._build(context, on_device)
        self._with_kv = NoDrafts() if with_kv is None else self._device_proposers[with_kv.name]
        self._exclusivity = [Exclusive.ALWAYS] * sizes.rows
        self._num_top: dict[int, int] = {}  # of rows that request log-probabilities
        self._pending: deque[EnqueuedStep] = deque()
        self.is_on_device = False  # whether the current step runs on the device
        # Of the current step: per proposer the rows that want each draft token, and the arguments
        # of `TargetPasses.run`.
        self._counts: list[list[int]] = []
        self._totals = (0, 0, 0, 0)

    def _build(
        self, context: ProposerContext, on_device: Sequence[ProposerEntry]
    ) -> dict[str, DeviceProposer]:
        return {
            entry.traits.name: build_on_device(
                entry,
                DeviceContext(
                    rows=context.rows,
                    settings=context.settings,
                    ops=context.ops,
                    verification=context.verification,
                    draft=context.draft,
                    head=context.head,
                    samplers=self._target.samplers,
                    computed=self._proposers.computed,
                    state=self._state,
                    entries=entries,
                    catch_up=self._plan.catch_up,
                    sizes=self.sizes,
                    passes=self._passes,
                ),
            )
            for entry, entries in zip(on_device, self._plan.drafting, strict=True)
        }

    # -- the step ---------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """On a GPU the next step is enqueued while this one runs."""
        return int(self.device.type == "cuda")

    @property
    def max_depth(self) -> int | None:
        return self.sizes.depth

    def exclusivity(self, spec: RequestSpec) -> Exclusive:
        """When the request needs exclusive steps."""
        return exclusivity(spec, self.sizes.max_len, self._is_shared_noise)

    def events(self) -> Sequence[DraftEvent]:
        """Always empty: an in-process draft is never lost."""
        return ()

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        raise AssertionError("an in-process draft never joins")

    def propose(self, plan: StepPlan) -> Ticket:
        """Enqueue what does not depend on drafts: row changes, block tables, the plan."""
        self._begin(plan)
        self.is_on_device = self._can_run(plan)
        if not self.is_on_device:
            self._drain()
            self._extend_tables(plan)
            return self._proposers.propose(_without_catch_up(plan))
        self._extend_tables(plan)
        self._upload(plan, self._with_kv.plan_catch_up(plan))
        return Ticket(plan.step)

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome:
        """Enqueue the passes of the plan that was proposed for last."""
        if not self.is_on_device:
            return self._verify_on_host(plan, ticket)
        return self.enqueue(plan)

    def enqueue(self, plan: StepPlan) -> EnqueuedStep:
        late = self._take_late_results()
        outcomes = Readback(self._passes.outcomes, self._host_outcomes)
        totals = self._totals
        for proposer, counts in zip(self._device_proposers.values(), self._counts, strict=True):
            if counts:
                proposer.draft(counts)
        outcomes.record_drafted()
        with_logprobs = self._has_logprobs(plan)
        self._passes.run(*totals, with_logprobs)
        logprobs = self._read_logprobs(totals[2]) if with_logprobs else None
        outcomes.enqueue(len(plan.rows))
        for proposer in self._device_proposers.values():
            proposer.after_target_pass(plan, totals[0], totals[2])
        self._with_kv.catch_up()
        step = EnqueuedStep(
            plan, outcomes, lambda step: self._settle(step, outcomes, logprobs, late)
        )
        while self._pending and self._pending[0].is_known:
            self._pending.popleft()
        self._pending.append(step)
        return step

    def can_wait(self, plan: StepPlan) -> bool:
        """Whether the plan that was proposed for last may be enqueued behind a wait for the host:
        it allocates no memory, which might itself wait for the device."""
        is_captured = self._totals[0] <= self._passes.body.largest
        return self.is_on_device and is_captured and not self._has_logprobs(plan)

    def _has_logprobs(self, plan: StepPlan) -> bool:
        num_top = self._num_top
        return bool(num_top) and any(row.samples and row.row in num_top for row in plan.rows)

    def _verify_on_host(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        """The next step may be enqueued before this one is applied, so update the device now."""
        late = self._take_late_results()
        verdict = self._target.verify(plan, ticket)
        self._proposers.observe(verdict)
        self._sync_device(verdict)
        catch_up = self._with_kv.plan_catch_up(plan)
        if catch_up.entries:
            no_drafting = ((),) * len(self._device_proposers)
            self._plan.fill((), no_drafting, (0, 0, 0), catch_up=catch_up)
        self._with_kv.catch_up()
        return _with_late_results(verdict, late)

    def observe(self, verdict: Verdict) -> None:
        """Nothing to do: the proposers observed the step when it ran."""

    @property
    def outcomes(self) -> Tensor:
        """Of the step that was enqueued last, a row per row of its plan."""
        return self._passes.outcomes

    def device_proposer(self, name: str) -> DeviceProposer | None:
        return self._device_proposers.get(name)

    def capture(self, on_size: Callable[[], None]) -> None:
        """Capture every pass; `on_size` is called after each of `num_captures`."""
        capture_all(self._captured_passes(), on_size)

    def measure_costs(self) -> StepCosts:
        """Times the parts of a step. Rows, texts and KV stay unchanged."""
        self._plan.fill((), ((),) * len(self._device_proposers), (0, 0, 0))
        return measure_costs(self._passes, self._target.runner, self._device_proposers.values())

    def capture_largest(self) -> int:
        """Capture only the largest of each kind of pass; returns a bound on the additional bytes of
        the others."""
        return capture_largest(self._captured_passes(), self.device)

    def release(self) -> None:
        """Destroy the graphs; a group must not end before them."""
        for passes in self._captured_passes():
            passes.release()

    @property
    def num_captures(self) -> int:
        return sum(len(passes.sizes) for passes in self._captured_passes())

    def _captured_passes(self) -> Sequence[CapturedPasses]:
        drafting = [each for own in self._device_proposers.values() for each in own.captured_passes]
        passes = self._passes
        return [passes.body, passes.head, passes.logprobs_head, passes.selection, *drafting]

    # -- what captured passes can run --------------------------------------------------------

    def _can_run(self, plan: StepPlan) -> bool:
        return all(
            not self._runs_exclusively(row.row)
            and (not row.depth or row.proposer in self._device_proposers)
            for row in plan.rows
        )

    def _runs_exclusively(self, row: int) -> bool:
        when = self._exclusivity[row]
        return when is not Exclusive.NEVER and (when is Exclusive.ALWAYS or self._is_prompt(row))

    def _begin(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        self._target.begin(plan)
        self._proposers.follow(plan)
        for row in plan.draft_released:
            self._state.set_draft_computed(row, 0)
        for init in plan.admitted:
            row, sampler, num_top = init.row, self._target.samplers[init.row], init.params.logprobs
            self._exclusivity[row] = exclusivity(init, self.sizes.max_len, self._is_shared_noise)
            is_adjusted = sampler.changes_logits and self._exclusivity[row] is not Exclusive.ALWAYS
            self._state.admit(init, sampler, is_adjusted=is_adjusted)
            self._state.set_logprobs(row, num_top)
            self._num_top.pop(row, None)
            if num_top is not None:
                self._num_top[row] = num_top
            for proposer in self._device_proposers.values():
                proposer.begin(row)

    # -- enqueueing --------------------------------------------------------------------------

    def _extend_tables(self, plan: StepPlan) -> None:
        """Extend the block tables of the device, and of the host for steps that run there."""
        for row in plan.rows:
            if row.target_blocks:
                self._target.runner.extend_table(row.row, row.target_start, row.target_blocks)
                self._state.extend_target_table(row.row, row.target_start, row.target_blocks)
            if row.draft_blocks:
                self._with_kv.extend_table(row.row, row.draft_start, row.draft_blocks)
        self._state.flush_tables()

    def _upload(self, plan: StepPlan, catch_up: PassShare) -> None:
        """Enqueue the copy of the plan."""
        num_dropped = drafts_dropped(plan)
        total = sum(row.pass_tokens for row in plan.rows) - num_dropped
        tile_tokens = self._passes.tile_tokens
        computed = self._target.computed
        entries: list[tuple[int, ...]] = []
        drafting: dict[str, list[tuple[int, ...]]] = {name: [] for name in self._device_proposers}
        first = tile = logit = 0
        for row in plan.rows:
            number, count = row.row, row.pass_tokens
            start = -1  # the last token, at a position only the device knows
            if self._is_prompt(number):
                start = computed[number]
                computed[number] = start + row.num_tokens
            verified = row.num_verified if row.samples else -1
            drafted = row.depth if row.draft_tokens else 0
            entries.append((number, count, start, verified, first, tile, logit, drafted))
            if row.depth:
                drafting[row.proposer].append((number, 0, 0, row.depth, 0, 0, 0, 0))
            first += count
            tile += -(-count // tile_tokens)
            logit += verified + 1
        self._counts = [order_by_depth(rows) for rows in drafting.values()]
        num_selected = -1 if plan.num_selected is None else plan.num_selected
        planned, own = (first, tile, logit), list(drafting.values())
        self._plan.fill(entries, own, planned, num_selected, tile_tokens, catch_up)
        max_tiles = min(tile, len(entries) + total // tile_tokens)
        num_selecting = len(entries) if num_dropped else 0
        self._totals = (total, max_tiles, logit - num_dropped, num_selecting)

    def _is_prompt(self, row: int) -> bool:
        """Whether text that the row was admitted with, which the host has, is still to compute."""
        return self._target.computed[row] < len(self._rows[row].init.token_ids)

    # -- outcomes ----------------------------------------------------------------------------

    def _read_logprobs(self, num_logits: int) -> LogprobsReadback:
        return LogprobsReadback(self._passes.logprobs[:num_logits], self._target.runner.vocab_size)

    def _settle(
        self,
        step: EnqueuedStep,
        outcomes: Readback,
        logprobs: LogprobsReadback | None,
        late: Sequence[LateResult],
    ) -> Verdict:
        """The verdict of a step that ran on the device; extends the host's texts."""
        plan, offered = step.plan, step.offered
        host_outcomes: list[list[int]] = outcomes.records().tolist()
        rows = []
        logit = 0
        for row, outcome in zip(plan.rows, host_outcomes, strict=True):
            # Ranks beside the first may get a plan in which the row has ended before they are here.
            is_current = self._rows.is_current(row.row, row.generation)
            if not row.samples:
                base_len = len(self._rows[row.row].tokens) if is_current else 0
                rows.append(RowVerdict(row.row, row.generation, base_len, 0, 0, 0, ()))
                continue
            own = row_verdict(row, outcome)
            if logprobs is not None and row.row in self._num_top:
                found = logprobs.of(logit, own.tokens, self._num_top[row.row])
                own = own._replace(logprobs=found)
            logit += own.num_verified + 1
            if row.row in offered and row.draft_tokens:
                own = _with_fewer_drafts(own, offered[row.row])
            rows.append(own)
            if is_current:
                self._target.computed[row.row] = own.base_len + own.num_accepted
        verdict = Verdict(plan.epoch, plan.step, tuple(rows), *outcomes.seconds())
        self._rows.commit(verdict)
        self._proposers.note(plan, verdict)
        return _with_late_results(verdict, late)

    def _take_late_results(self) -> list[LateResult]:
        """Of earlier steps."""
        return [each for own in self._device_proposers.values() for each in own.take_late_results()]

    def _drain(self) -> None:
        """Wait for the enqueued steps, so that the host has every text."""
        while self._pending:
            self._pending.popleft().wait()

    def _sync_device(self, verdict: Verdict) -> None:
        """Extend the device's texts after a step that ran on the host."""
        computed_by_row = self._proposers.computed
        for row in verdict.rows:
            number = row.row
            computed = computed_by_row.get(number, 0)
            self._state.extend_text(number, row.base_len, row.tokens, computed)


def _with_fewer_drafts(own: RowVerdict, count: int) -> RowVerdict:
    """The others were not there, and the pass verified padding in their place."""
    count = max(count, own.num_accepted)  # the device may have had a round that the host had lost
    return own._replace(num_drafted=count, num_verified=min(own.num_verified, count))


def _with_late_results(verdict: Verdict, late: Sequence[LateResult]) -> Verdict:
    for each in late:
        verdict = each.added_to(verdict)
    return verdict


def _without_catch_up(plan: StepPlan) -> StepPlan:
    """Catch-up runs after the step: drop it from the rows that do not draft."""
    rows = (row if row.depth else row._replace(draft_tokens=0) for row in plan.rows)
    return replace(plan, rows=tuple(rows))
