"""Speculation control: estimates of cost, acceptance and load, and the choice made from them.

One instance per engine. The planner asks once a step; verdicts update the estimates. The policy
itself is a pure function (`depths.py`); the state behind its snapshot is kept here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import log
from operator import is_
from typing import NamedTuple

from outrider.errors import ConfigError
from outrider.scheduler.acceptance import AcceptanceEstimator
from outrider.scheduler.ahead import SEQUENTIAL, AheadControl, AheadPlan
from outrider.scheduler.costs import LiveCosts, StepCosts
from outrider.scheduler.depths import NO_COSTS, Candidate, ChooseDepths, DepthChoice, DepthSnapshot
from outrider.scheduler.load import Load
from outrider.scheduler.policies import (
    AHEAD_OFF,
    FIXED,
    FIXED_DEPTH_POLICIES,
    GOODPUT,
    OFF,
    POLICIES,
    TRIM,
)
from outrider.scheduler.proposers import ProposerTraits
from outrider.scheduler.request import Request
from outrider.scheduler.types import Agreement, Verdict

_STEP_WEIGHT = 0.05  # of a step in moving averages
_REMEMBERED_STEPS = 256
_REFRESH_EVERY = 4  # steps between updates of the acceptance estimates
# While nothing is drafted: the share of time spent on probing what drafting would gain, of steps
# with a row whose depth the policy chooses.
_PROBE_SHARE = 0.006
_PROBE_TOKENS = 32
_LARGEST_PROBE_BUDGET_S = 1.0
_EXPLORE_EVERY = 128  # steps between trial drafts of a proposer that cannot be probed
_MIN_PROMPT_TOKENS = 16  # per step, even over the time limit
# Selected drafts are a biased sample, so acceptance is learned in other steps.
_SELECT_ALL_EVERY = 8
_KEPT_STEPS = 8  # for which plain decoding is kept for the same rows, unless estimates change
_TRUST_IF_CAN_STOP = 0.5  # in a row's acceptance bias, where its drafting may stop early
_LEAST_REMAINING = 50  # tokens, of the row that has written most
_FIRST_GAIN, _MAX_GAIN = 0.2, 0.6


@dataclass(slots=True)
class StepRecord:
    """A step as decided, and its outcome."""

    step: int
    num_rows: int
    num_prompt_tokens: int
    num_waiting: int
    choice: DepthChoice
    num_drafts: int  # in the plan
    num_tokens: int  # of the target's pass
    num_caught_up: int  # tokens of the draft
    context: int
    policy: str = ""  # that chose
    ahead: AheadPlan = SEQUENTIAL
    committed: int | None = None  # by decode rows; None until the verdict is there
    draft_s: float = 0.0
    verify_s: float = 0.0


class _Refusal(NamedTuple):
    """Drafting does not pay for any of these rows: the step and the costs of that finding."""

    requests: list[Request]
    choice: DepthChoice
    costs: StepCosts
    step: int


@dataclass(slots=True)
class DecodeRows:
    """The decode rows of a step and their limits; lists by row."""

    requests: list[Request] = field(default_factory=list)
    proposers: list[str] = field(default_factory=list)
    max_depths: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    context: int = 0


class SpeculationControl:
    """See the module. Without measured costs, policies that need them draft to the limit."""

    def __init__(
        self,
        policy: str | ChooseDepths = FIXED,
        costs: StepCosts | None = None,
        *,
        seats: int = 1,
        step_limit_s: float | None = None,
        can_select: bool = False,
        draft_ahead: str = AHEAD_OFF,
    ) -> None:
        """`can_select`: the workers can verify the likeliest of all drafts only. `step_limit_s`
        bounds a step with both prompts and decode rows."""
        self.max_depth: int | None = None  # of any request; None: its own limit
        self.is_measured = costs is not None
        self.costs = LiveCosts(costs or NO_COSTS)
        self.records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        self.acceptance = 0.5  # of recently verified drafts
        self.agreement: float | None = None  # of drafts with output they caught up on
        self.gain = 1.0  # estimated, of the choice over plain decoding
        self.steps_without = 0  # since the last step with drafts
        self._step_limit_s = step_limit_s
        self.load = Load(seats)
        self.ahead = AheadControl(draft_ahead)
        self.ahead_plan = SEQUENTIAL  # of the step chosen last
        self._estimators: dict[str, AcceptanceEstimator] = {}
        self._max_behind: dict[str, int] = {}  # by proposer with KV
        self._looks_up: set[str] = set()  # proposers that may offer less than requested
        self.has_model = True  # a draft or a head, which offers as many drafts as requested
        self._previous_batch_depth = 0
        self._prompt_tokens = 0.0  # a step, on average
        self._prompt_share = 0.0  # of steps that have any
        self._probe_budget_s = 0.0
        self._caught_up_before = 0  # tokens of the draft, in the step observed last
        self._chooses_depth = False  # of any row in the last step
        self._can_select = can_select
        self.selection_gain = _FIRST_GAIN if can_select else 0.0
        self._is_turn_of_new = False
        self._refusal: _Refusal | None = None
        self.policy_name = ""
        self.set_policy(policy)

    def set_policy(self, policy: str | ChooseDepths) -> None:
        """From the next step on; a name, or a function."""
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise ConfigError(
                    f"the policy is {policy!r}; it must be one of {', '.join(POLICIES)}."
                )
            self.policy_name, self._choose = policy, POLICIES[policy]
        else:
            self.policy_name, self._choose = getattr(policy, "__name__", "custom"), policy
        if self.policy_name in (GOODPUT, TRIM) and not self.is_measured:
            self._choose = POLICIES[FIXED]  # costs are not known
        self._refusal = None
        self._is_adaptive = self.policy_name not in (*FIXED_DEPTH_POLICIES, OFF)
        self._previous_batch_depth = int(self.policy_name != OFF)

    def set_costs(self, costs: StepCosts) -> None:
        """Replace the costs by newly measured ones."""
        self.is_measured = True
        self.costs = LiveCosts(costs)
        self._choose = POLICIES.get(self.policy_name, self._choose)

    def add_proposers(self, proposers: Collection[ProposerTraits]) -> None:
        self.has_model = not all(each.may_offer_less for each in proposers)
        for each in proposers:
            self._estimators[each.name] = AcceptanceEstimator()
            if each.may_offer_less:
                self._looks_up.add(each.name)
            if each.keeps_kv:
                self._max_behind[each.name] = each.max_behind

    def end(self, request: Request) -> None:
        self._refusal = None  # it refers to the request
        self.load.observe_end(request.arrival_s)

    # -- planning -----------------------------------------------------------------------------

    def prompt_room(self, num_decoding: int, budget: int) -> int:
        """Prompt tokens that fit beside `num_decoding` rows within the step's time limit."""
        limit_s = self._step_limit_s
        if not num_decoding or limit_s is None or not self.is_measured:
            return budget
        table, low, high = self.costs.now.verify, min(_MIN_PROMPT_TOKENS, budget), budget
        if table.at(num_decoding + high) <= limit_s:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if table.at(num_decoding + middle) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def allows_drafts(self, request: Request) -> bool:
        """Whether it may draft under the current settings; a fixed depth overrides `off`."""
        return self.max_depth != 0 and (self.policy_name != OFF or request.is_depth_fixed)

    @property
    def wants_prompts(self) -> bool:
        """Whether the draft computes prompts as well, because their rows will draft."""
        return self._previous_batch_depth > 0

    @property
    def last_chosen_depth(self) -> int | None:
        """Of the last step, at least 1; None if the policy's depth is fixed."""
        return max(self._previous_batch_depth, 1) if self._is_adaptive else None

    def choose(
        self, step: int, room: int, num_prompt_tokens: int, num_waiting: int, rows: DecodeRows
    ) -> DepthChoice:
        estimators = self._estimators
        if step % _REFRESH_EVERY == 0:
            for each in estimators.values():
                each.refresh()
        self._prompt_tokens += _STEP_WEIGHT * (num_prompt_tokens - self._prompt_tokens)
        self._prompt_share += _STEP_WEIGHT * ((num_prompt_tokens > 0) - self._prompt_share)
        costs = self.costs.now
        refusal = self._refusal
        self.ahead_plan = self.ahead.plan(len(rows.requests))
        if refusal is not None and not num_prompt_tokens and self._still_holds(refusal, step, rows):
            self.steps_without += 1
            return refusal.choice
        is_fixed = [request.is_depth_fixed for request in rows.requests]
        self._chooses_depth = any(
            limit and not fixed for limit, fixed in zip(rows.max_depths, is_fixed, strict=True)
        )
        max_behind = self._max_behind
        behind = [
            each if name in max_behind else 0
            for each, name in zip(rows.behind, rows.proposers, strict=True)
        ]
        ready = [
            each <= max_behind.get(name, 0)
            for each, name in zip(behind, rows.proposers, strict=True)
        ]
        can_stop = step % _SELECT_ALL_EVERY > 0 and self._can_stop(rows, num_prompt_tokens)
        # A draft's confidence already reflects the current text, so the row's bias counts for less.
        trust = _TRUST_IF_CAN_STOP if can_stop else 1.0
        snapshot = DepthSnapshot(
            step,
            room,
            num_prompt_tokens,
            num_waiting,
            rows.proposers,
            rows.max_depths,
            behind,
            ready,
            is_fixed if any(is_fixed) else (),
            [
                estimators[name].survivals(request.acceptance_bias, depth, trust) if depth else ()
                for request, name, depth in zip(
                    rows.requests, rows.proposers, rows.max_depths, strict=True
                )
            ],
            rows.context,
            self.ahead_plan.costs(costs),
            self._prompt_tokens * costs.prefill_s + self._prompt_share * costs.first_draft.at(1),
            self._previous_batch_depth,
            self.load.share,
            self.acceptance,
            self.selection_gain if step % _SELECT_ALL_EVERY else 0.0,
            can_stop=can_stop,
            only_looks_up=self._looks_up.issuperset(rows.proposers),
            remaining=self._remaining(rows, num_waiting),
        )
        choice = self._choose(snapshot)
        self._follow(choice)
        self._refusal = None
        if self._is_adaptive and not self._previous_batch_depth:
            is_plain_step = not num_prompt_tokens and snapshot.selection_gain == self.selection_gain
            # Other policies are cheap, and may depend on the step number; fixed depths cannot be
            # refused.
            if is_plain_step and self.policy_name == GOODPUT and not any(is_fixed):
                self._refusal = _Refusal(list(rows.requests), choice, costs, step)
            return self._explore(choice, step, rows)
        return choice

    def _remaining(self, rows: DecodeRows, num_waiting: int) -> Sequence[int]:
        """What the rows are assumed to write yet, where they are the last: what the longest is
        ahead of them, and a little. What their clients allow would let one take the others'
        drafts."""
        if len(rows.requests) < 2 or not self.load.is_draining(len(rows.requests), num_waiting):
            return ()
        written = [len(each.tokens) - each.prompt_len for each in rows.requests]
        longest = max(written) + _LEAST_REMAINING
        return [longest - each for each in written]

    def _still_holds(self, refusal: _Refusal, step: int, rows: DecodeRows) -> bool:
        """Whether the refusal still holds: choosing again takes a fortieth of a small model's
        pass."""
        return (
            self.costs.now is refusal.costs
            and step < refusal.step + _KEPT_STEPS
            and step % _EXPLORE_EVERY > 0
            and len(rows.requests) == len(refusal.requests)
            and all(map(is_, rows.requests, refusal.requests))
        )

    def _can_stop(self, rows: DecodeRows, num_prompt_tokens: int) -> bool:
        """Whether low confidence may end a row's drafting early: only where it is alone in the step
        and passes are not padded, so that one draft less makes both passes shorter."""
        return (
            self._can_select
            and len(rows.requests) == 1
            and not num_prompt_tokens
            and not rows.requests[0].is_depth_fixed
            and rows.proposers[0] in self._max_behind
            and not self.costs.now.verify.is_padded
        )

    def _follow(self, choice: DepthChoice) -> None:
        batch_depth = (
            max(choice.depths, default=0) if choice.batch_depth is None else choice.batch_depth
        )
        self.steps_without = 0 if batch_depth else self.steps_without + 1
        self._previous_batch_depth = batch_depth
        if choice.candidates and choice.chosen is not None:
            plain = choice.candidates[0].tokens_per_s
            gain = choice.chosen.tokens_per_s / plain if plain else 1.0
            self.gain += _STEP_WEIGHT * (gain - self.gain)

    def _explore(self, choice: DepthChoice, step: int, rows: DecodeRows) -> DepthChoice:
        """A proposer without KV cannot be probed by catching up: now and then one row drafts one
        token."""
        if step % _EXPLORE_EVERY:
            return choice
        count = len(rows.requests)
        start = step // _EXPLORE_EVERY % max(count, 1)
        for index in (*range(start, count), *range(start)):
            if rows.max_depths[index] and rows.proposers[index] not in self._max_behind:
                depths = list(choice.depths)
                depths[index] = 1
                return DepthChoice(depths, choice.num_selected, choice.chosen, choice.candidates)
        return choice

    def probes(self, rows: DecodeRows) -> Sequence[int]:
        """While nothing is drafted: the row whose draft catches up, to compare its guesses with the
        text; as often as the probe budget allows, and only with enough tokens to compare. New rows
        and rows it already follows alternate, so that old and new texts are both sampled."""
        if not self._is_adaptive or self._previous_batch_depth or not self.is_measured:
            return ()
        with_kv = self._max_behind
        followed, fewest_known, new = -1, 0.0, -1
        for index, request in enumerate(rows.requests):
            if not rows.max_depths[index] or rows.proposers[index] not in with_kv:
                continue
            done = request.draft.planned
            if done < request.prompt_len:
                new = index  # the newest of these has most of its output ahead
            elif len(request.tokens) - done >= _PROBE_TOKENS and (
                followed < 0 or request.acceptance_bias.reached < fewest_known
            ):
                followed, fewest_known = index, request.acceptance_bias.reached
        if followed < 0 and new < 0:
            return ()
        costs = self.costs.now
        cost_s = costs.catch_up_s(_PROBE_TOKENS)
        chosen = followed
        if new >= 0 and (followed < 0 or self._is_turn_of_new):
            chosen, request = new, rows.requests[new]
            missing = request.prompt_len - request.draft.planned
            cost_s = costs.catch_up_s(missing)
        if cost_s > self._probe_budget_s:
            return ()
        self._probe_budget_s = min(self._probe_budget_s, 2 * cost_s) - cost_s
        self._is_turn_of_new = chosen == followed
        return (chosen,)

    # -- learning -----------------------------------------------------------------------------

    def observe_round(self, request: Request, num_verified: int, num_accepted: int) -> None:
        estimator = self._estimators.get(request.proposer)
        if num_verified:
            self._refusal = None
        if estimator is not None:
            estimator.observe_round(request.acceptance_bias, num_verified, num_accepted)

    def observe_agreement(self, request: Request, agreement: Agreement) -> None:
        hits = agreement.hits
        estimator = self._estimators.get(request.proposer)
        if estimator is None or not hits:
            return
        self._refusal = None
        estimator.observe_agreement(request.acceptance_bias, hits)
        share = sum(hits) / len(hits)
        known = share if self.agreement is None else self.agreement
        self.agreement = known + 0.1 * (share - known)

    def observe_step(
        self, record: StepRecord, verdict: Verdict, committed: int, verified: int, accepted: int
    ) -> None:
        record.committed = committed
        record.draft_s, record.verify_s = verdict.draft_s, verdict.verify_s
        if self._chooses_depth:  # or other requests would build up a budget
            spent_s = verdict.draft_s + verdict.verify_s
            self._probe_budget_s = min(
                self._probe_budget_s + _PROBE_SHARE * spent_s, _LARGEST_PROBE_BUDGET_S
            )
        if verified:
            self.acceptance += _STEP_WEIGHT * (accepted / verified - self.acceptance)
        if not self.is_measured:
            return
        self._observe_catch_up(record, verdict)
        self._observe_ahead(record, verdict)
        chosen, may_stop = record.choice.chosen, record.choice.least_survival > 0
        if may_stop:  # all drafts made were verified
            self.costs.observe_verify(record.num_rows + verified, record.context, verdict.verify_s)
            if verified and not record.num_caught_up and not record.ahead.num_branches:
                self.costs.observe_draft(self.costs.now.drafting_s(verified), verdict.draft_s)
            return
        num_tokens = record.num_tokens
        if not self.costs.now.verify.is_padded:  # a proposer may have offered less than planned
            num_tokens = record.num_rows + record.num_prompt_tokens + verified
        self.costs.observe_verify(num_tokens, record.context, verdict.verify_s)
        if chosen is None:
            return
        is_as_chosen = record.num_drafts == chosen.num_drafts
        if is_as_chosen and chosen.num_drafts and not record.num_caught_up:
            if not record.ahead.num_branches:
                self.costs.observe_draft(chosen.draft_s, verdict.draft_s)
            if chosen.num_verified < chosen.num_drafts:
                self._see_selection(chosen, record.num_rows, accepted)

    def _observe_catch_up(self, record: StepRecord, verdict: Verdict) -> None:
        """While nothing is drafted, what probes take is all that tells what a draft costs. A GPU
        reports it with the next step, so of two steps in a row that catch up neither counts."""
        before, self._caught_up_before = self._caught_up_before, record.num_caught_up
        num_tokens = record.num_caught_up or before
        if num_tokens and not (record.num_caught_up and before) and not record.num_drafts:
            self.costs.observe_draft(self.costs.now.catch_up_s(num_tokens), verdict.draft_s)

    def _observe_ahead(self, record: StepRecord, verdict: Verdict) -> None:
        """Steps with drafts, and nothing else for the draft to do."""
        if not record.num_drafts or record.num_caught_up or record.num_prompt_tokens:
            return
        measured, num_rows = self.costs.measured, record.num_rows  # these do not change
        depth = -(-record.num_drafts // num_rows)
        verify_s = measured.verify.at(record.num_tokens) + record.context * measured.context_s
        sequential_s = measured.round_s(num_rows, depth) + verify_s
        draft_s = self.costs.now.round_s(num_rows, depth)
        if sequential_s > 0 and draft_s > 0:
            ratio = (verdict.draft_s + verdict.verify_s) / sequential_s
            self.ahead.observe(num_rows, record.ahead, ratio, verdict.draft_s / draft_s)

    def _see_selection(self, chosen: Candidate, num_rows: int, accepted: int) -> None:
        """Compare the accepted drafts of a selection with the prediction."""
        share = chosen.num_verified / chosen.num_drafts
        promised = (chosen.tokens - num_rows) / share ** (1 - self.selection_gain)
        if promised > 0 and share < 0.9:
            found = max(min(accepted / promised, 1.0), 0.01)
            gain = 1 - log(found) / log(share)
            self.selection_gain += _STEP_WEIGHT * (
                min(max(gain, 0.0), _MAX_GAIN) - self.selection_gain
            )
            self.selection_gain = max(self.selection_gain, 0.01)  # so that selection is tried again
