"""Target and proposers on one GPU: a step is enqueued whole, and its outcome read a step later.

Plans come from the host, texts stay on the device. What the recorded passes cannot do (see
`outrider.workers.gpu.rare`) is done by the workers of other devices, in steps without other
requests, on the host's copy of the texts; the device is told the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from outrider.kernels.gpu.accept import OutcomeColumn
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.proposers import own_guesses_kept
from outrider.scheduler.types import (
    NO_TOKEN,
    Apart,
    DraftEvent,
    Outcome,
    PendingVerdict,
    RequestSpec,
    RowInit,
    RowVerdict,
    StepPlan,
    Ticket,
    TokenLogprobs,
    Verdict,
)
from outrider.workers.gpu.adjustments import RowAdjustment
from outrider.workers.gpu.catching_up import CatchUp, CatchUpPasses, CatchUpWork, Tail, with_tails
from outrider.workers.gpu.costs import measure_costs
from outrider.workers.gpu.drafting import DraftPasses
from outrider.workers.gpu.heading import Extension, HeadPasses, head_passes, with_extensions
from outrider.workers.gpu.logprobs import ToldLogprobs
from outrider.workers.gpu.passes import TargetPasses
from outrider.workers.gpu.plan_buffers import (
    StepPlanBuffers,
    StepSizes,
    drafts_dropped,
    order_by_depth,
)
from outrider.workers.gpu.proposing import DeviceContext
from outrider.workers.gpu.rare import apart
from outrider.workers.gpu.readback import Readback
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.base import DRAFT, Proposers, ProposerSettings
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.proposers.head import HeadProposer
from outrider.workers.proposers.registry import ProposerEntry
from outrider.workers.recorded.recording import RecordedPasses, record_all, record_largest
from outrider.workers.rows import RowTable
from outrider.workers.target import TargetWorker

_BASE_LEN, _NUM_ACCEPTED = OutcomeColumn.BASE_LEN, OutcomeColumn.NUM_ACCEPTED
_DEPTH, _TOKENS = OutcomeColumn.DEPTH, OutcomeColumn.TOKENS


class ColocatedWorker:
    """Proposes and verifies on one device; see `outrider.engine.step`."""

    def __init__(
        self,
        rows: RowTable,
        target: TargetWorker,
        draft: DraftProposer | None,
        head: HeadProposer | None,
        proposers: Proposers,
        on_device: Iterable[ProposerEntry],
        sizes: StepSizes,
        settings: ProposerSettings,
        is_shared_noise: bool,
    ) -> None:
        """`proposers` draft from the host's texts, in steps that run there; those in `on_device`
        in all others."""
        self._rows = rows
        self._target = target
        self._draft = draft
        self._head = head
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
        head_runner = None if head is None else head.runner
        common = (sizes, settings, self._passes, draft_runner, head_runner)
        self._device_proposers = {
            name: build(DeviceContext(self._state, entries, *common))
            for (name, build), entries in zip(building, self._plan.drafting, strict=True)
        }
        self._heading = head_passes([*self._device_proposers.values()])
        self._catching_up = None
        if draft is not None:
            passes = CatchUpPasses(draft.runner, self._state, self._plan.catching_up, sizes)
            samplers = target.samplers
            self._catching_up = CatchUp(rows, samplers, self._state, draft, passes, is_shared_noise)
        self._apart = [Apart.ALWAYS] * sizes.rows
        self._num_top: dict[int, int] = {}  # of rows that want log-probabilities
        self._headed: set[int] = set()  # rows that the head drafts for, now or later
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

    def apart(self, spec: RequestSpec) -> Apart:
        """When the request needs steps without others."""
        return apart(spec, self._sizes.max_len, self._is_shared_noise)

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
            return self._proposers.propose(_without_catching_up(plan))
        self._extend_tables(plan)
        return Ticket(plan.step)

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome:
        if not self._is_on_device:
            return self._verify_on_host(plan, ticket)
        tails, extensions = self._take_tails(), self._take_extensions()
        outcomes = Readback(self._passes.outcomes)
        behind = self._plan_catching_up(plan)
        drafting, totals = self._upload(plan, behind)
        for proposer, counts in zip(self._device_proposers.values(), drafting, strict=True):
            if counts:
                proposer.draft(counts)
        outcomes.mark_drafted()
        wanting = self._num_top
        tells = bool(wanting) and any(row.samples and row.row in wanting for row in plan.rows)
        self._passes.run(*totals, tells)
        told = self._read_logprobs(totals[2]) if tells else None
        outcomes.enqueue(len(plan.rows))
        if self._heading is not None and any(row.row in self._headed for row in plan.rows):
            self._heading.follow(totals[0], totals[2])
        self._catch_up(behind)
        pending = PendingVerdict(lambda: self._settle(plan, outcomes, told, tails, extensions))
        while self._pending and self._pending[0].is_known:
            self._pending.popleft()
        self._pending.append(pending)
        return pending

    def _verify_on_host(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        """The next step may be enqueued before this one is applied, so the device is told now."""
        tails, extensions = self._take_tails(), self._take_extensions()
        verdict = self._target.verify(plan, ticket)
        self._proposers.observe(verdict)
        self._tell_device(verdict)
        behind = self._plan_catching_up(plan)
        if behind.share.entries:
            nobody = ((),) * len(self._device_proposers)
            self._plan.fill((), nobody, (0, 0, 0), catching_up=behind.share)
        self._catch_up(behind)
        return with_extensions(with_tails(verdict, tails), extensions)

    def observe(self, verdict: Verdict) -> None:
        """What there was to learn was learned when the step ran."""

    def record(self, on_size: Callable[[], None]) -> None:
        """Record every pass; `on_size` is called after each of `num_recordings`."""
        record_all(self._recordings(), on_size)

    def measure_costs(self) -> StepCosts:
        """What the parts of a step take. Rows, texts and KV stay as they are."""
        self._plan.fill((), ((),) * len(self._device_proposers), (0, 0, 0))
        drafting = self._device_proposers.get(DRAFT, self._heading)
        return measure_costs(
            self._passes,
            self._target.runner,
            drafting.rounds if isinstance(drafting, DraftPasses | HeadPasses) else None,
            None if self._catching_up is None else self._catching_up.recorded,
            self._heading,
        )

    def record_largest(self) -> int:
        """Record the largest of each kind of pass, as `record` begins; returns a bound on the bytes
        that the others take beside them."""
        return record_largest(self._recordings(), self._device)

    @property
    def num_recordings(self) -> int:
        return sum(len(passes.sizes) for passes in self._recordings())

    def _recordings(self) -> Sequence[RecordedPasses]:
        drafting = [each for own in self._device_proposers.values() for each in own.recordings]
        catching_up = [] if self._catching_up is None else [self._catching_up.recorded]
        passes = self._passes
        own = [passes.body, passes.head, passes.telling_head, passes.selection]
        return [*own, *drafting, *catching_up]

    # -- what can run as recorded ------------------------------------------------------------

    def _can_run(self, plan: StepPlan) -> bool:
        return all(
            not self._is_apart(row.row)
            and (not row.depth or row.proposer in self._device_proposers)
            for row in plan.rows
        )

    def _is_apart(self, row: int) -> bool:
        when = self._apart[row]
        return when is not Apart.NEVER and (when is Apart.ALWAYS or self._is_prompt(row))

    def _begin(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        self._target.begin(plan)
        self._proposers.follow(plan)
        for row in plan.draft_released:
            self._state.set_draft_computed(row, 0)
        for init in plan.admitted:
            row, sampler, num_top = init.row, self._target.samplers[init.row], init.params.logprobs
            self._apart[row] = apart(init, self._sizes.max_len, self._is_shared_noise)
            self._state.set_text(row, init.token_ids, init.draft_cached)
            self._state.set_sampling(row, sampler)
            self._state.set_logprobs(row, num_top)
            self._headed.discard(row)
            if self._head is not None and init.proposer == self._head.name:
                self._headed.add(row)
            self._num_top.pop(row, None)
            if num_top is not None:
                self._num_top[row] = num_top
            is_adjusted = sampler.changes_logits and self._apart[row] is not Apart.ALWAYS
            adjustment = RowAdjustment.of(sampler, init.token_ids) if is_adjusted else None
            self._state.set_adjustment(row, adjustment)
            for proposer in self._device_proposers.values():
                proposer.begin(row)

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

    def _plan_catching_up(self, plan: StepPlan) -> CatchUpWork:
        return CatchUpWork() if self._catching_up is None else self._catching_up.plan(plan)

    def _catch_up(self, work: CatchUpWork) -> None:
        if self._catching_up is not None:
            self._catching_up.enqueue(work)

    def _take_tails(self) -> list[Tail]:
        return [] if self._catching_up is None else self._catching_up.take_tails()

    def _take_extensions(self) -> list[Extension]:
        return [] if self._heading is None else self._heading.take_extensions()

    def _upload(
        self, plan: StepPlan, behind: CatchUpWork
    ) -> tuple[list[list[int]], tuple[int, int, int, int]]:
        """The plan as the device reads it; how many rows want which draft of each proposer, and
        what `TargetPasses.run` is to be told of the pass."""
        num_dropped = drafts_dropped(plan)
        total = sum(row.pass_tokens for row in plan.rows) - num_dropped
        tile_tokens = self._passes.tile_tokens
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
            drafted = row.depth if row.draft_tokens else 0
            entries.append((number, count, start, verified, first, tile, logit, drafted))
            if row.depth:
                drafting[row.proposer].append((number, 0, 0, row.depth, 0, 0, 0, 0))
            first += count
            tile += -(-count // tile_tokens)
            logit += verified + 1
        counts = [order_by_depth(rows) for rows in drafting.values()]
        num_selected = -1 if plan.num_selected is None else plan.num_selected
        planned, own = (first, tile, logit), list(drafting.values())
        self._plan.fill(entries, own, planned, num_selected, tile_tokens, behind.share)
        most_tiles = min(tile, len(entries) + total // tile_tokens)
        totals = (total, most_tiles, logit - num_dropped, len(entries) if num_dropped else 0)
        return counts, totals

    def _is_prompt(self, row: int) -> bool:
        """Text that the row came with, and which the host therefore knows, is still to compute."""
        return self._target.computed[row] < len(self._rows[row].init.token_ids)

    # -- outcomes ----------------------------------------------------------------------------

    def _read_logprobs(self, num_logits: int) -> ToldLogprobs:
        return ToldLogprobs(self._passes.logprobs[:num_logits], self._target.runner.vocab_size)

    def _settle(
        self,
        plan: StepPlan,
        outcomes: Readback,
        told: ToldLogprobs | None,
        tails: Sequence[Tail],
        extensions: Sequence[Extension],
    ) -> Verdict:
        """The verdict of a step that ran on the device; the host's texts follow it."""
        found = outcomes.rows()
        rows = []
        logit = 0
        for row, outcome in zip(plan.rows, found, strict=True):
            if not row.samples:
                base_len = len(self._rows[row.row].tokens)
                rows.append(RowVerdict(row.row, row.generation, base_len, 0, 0, 0, ()))
                continue
            base_len, accepted = outcome[_BASE_LEN], outcome[_NUM_ACCEPTED]
            tokens = tuple(outcome[_TOKENS : _TOKENS + accepted + 1])
            is_broken = tokens[-1] == NO_TOKEN
            if is_broken:
                tokens = (*tokens[:-1], 0)  # as the device has it
            reach, verified = row.depth, outcome[_DEPTH]
            logprobs: tuple[TokenLogprobs, ...] = ()
            if told is not None and row.row in self._num_top:
                logprobs = told.of(logit, tokens, self._num_top[row.row])
            logit += verified + 1
            rows.append(
                RowVerdict(
                    *(row.row, row.generation, base_len, reach, verified, accepted, tokens),
                    logprobs,
                    is_broken=is_broken,
                )
            )
            self._target.computed[row.row] = base_len + accepted
            if row.draft_tokens and reach and self._draft is not None:
                kept = own_guesses_kept(reach, accepted)
                self._draft.computed[row.row] = base_len + kept
        verdict = Verdict(plan.epoch, plan.step, tuple(rows), *outcomes.seconds())
        verdict = with_extensions(with_tails(verdict, tails), extensions)
        self._rows.commit(verdict)
        if self._head is not None:
            self._head.note(verdict)
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


def _without_catching_up(plan: StepPlan) -> StepPlan:
    """Rows that are not drafted for catch up behind the step."""
    rows = (row if row.depth else row._replace(draft_tokens=0) for row in plan.rows)
    return replace(plan, rows=tuple(rows))
