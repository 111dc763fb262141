"""Speculation control: what is known of cost, chances and load, and the choice made from it.

One decision-maker for a whole engine. The planner asks once a step; verdicts teach. The policy
itself is a pure function (`depths.py`); everything it is told is kept here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import log
from operator import is_
from typing import NamedTuple

from outrider.errors import ConfigError
from outrider.scheduler.costs import LiveCosts, StepCosts
from outrider.scheduler.depths import NO_COSTS, Candidate, Choice, ChooseDepths, DepthSnapshot
from outrider.scheduler.hazards import Hazards
from outrider.scheduler.policies import FIXED, FIXED_DEPTH_POLICIES, GOODPUT, OFF, POLICIES, TRIM
from outrider.scheduler.proposers import ProposerTraits
from outrider.scheduler.request import Request
from outrider.scheduler.types import Agreement, Verdict

_SLOWLY = 0.05  # weight of a step in averages over the last steps
_REMEMBERED_STEPS = 256
_ARRIVALS = 64
_REFRESH_EVERY = 4  # steps until what verdicts taught is read again
# While nothing is drafted, so much of the time of steps with a row whose depth is the policy's to
# choose goes into finding out what it would be worth.
_PROBE_SHARE = 0.006
_PROBE_TOKENS = 32
_LARGEST_PROBE_BUDGET_S = 1.0
_EXPLORE_EVERY = 128  # steps, where a proposer can only be tried in earnest
_LEAST_PROMPT_TOKENS = 16  # prompts go on whatever a step may take
# What is selected is not a fair sample of what was drafted, so chances are learned in other steps.
_SELECT_ALL_EVERY = 8
_KEPT_STEPS = 8  # for which refused rows are not weighed anew, unless something new is known
_TRUST_IF_SURE = 0.5  # in a row's luck, where drafts end as soon as they are not sure
_FIRST_GAIN, _MOST_GAIN = 0.2, 0.6


@dataclass(slots=True)
class StepRecord:
    """A step as it was decided, and what then happened."""

    step: int
    num_rows: int
    num_prompt_tokens: int
    num_waiting: int
    choice: Choice
    num_drafts: int  # planned in the end
    num_tokens: int  # of the target's pass
    num_caught_up: int  # tokens of the draft
    context: int
    policy: str = ""  # that chose
    committed: int | None = None  # by decode rows; None until the verdict is there
    draft_s: float = 0.0
    verify_s: float = 0.0


class _Refusal(NamedTuple):
    """That none of these rows is worth drafting for: when it was found, and by what costs."""

    requests: list[Request]
    choice: Choice
    costs: StepCosts
    step: int


@dataclass(slots=True)
class Candidates:
    """The decode rows of a step and what each could use; lists by row."""

    requests: list[Request] = field(default_factory=list)
    proposers: list[str] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    context: int = 0


class SpeculationControl:
    """See the module's text. Without measured costs only policies that need none are of use."""

    def __init__(
        self,
        policy: str | ChooseDepths = FIXED,
        costs: StepCosts | None = None,
        *,
        seats: int = 1,
        step_limit_s: float | None = None,
        can_select: bool = False,
    ) -> None:
        """`can_select`: the workers can verify the likeliest of all drafts only. `step_limit_s`
        is the most that prompts may stretch a step others decode in."""
        self.max_depth: int | None = None  # of any request; None: its own limit
        self.is_measured = costs is not None
        self.costs = LiveCosts(costs or NO_COSTS)
        self.records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        self.acceptance = 0.5  # of drafts verified lately
        self.agreement: float | None = None  # of drafts with output they only caught up on
        self.gain = 1.0  # of the choice over plain decoding, as estimated
        self.steps_without = 0  # since anybody drafted
        self._step_limit_s = step_limit_s
        self._seats = seats
        self._hazards: dict[str, Hazards] = {}
        self._with_kv: set[str] = set()
        self._looks_up: set[str] = set()  # proposers that may offer less than they are asked for
        self.has_model = True  # a draft or a head, which offers as many drafts as it is asked for
        self._previous_level = 0
        self._prompt_tokens = 0.0  # a step, on average
        self._prompt_share = 0.0  # of steps that have any
        self._probe_budget_s = 0.0
        self._is_asked = False  # for any row's depth
        self._can_select = can_select
        self.selection_gain = _FIRST_GAIN if can_select else 0.0
        self._is_turn_of_new = False
        self._refusal: _Refusal | None = None
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)
        self._residence_s = 0.0
        self.now_s = 0.0
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
            self._choose = POLICIES[FIXED]  # nothing can be weighed against anything
        self._refusal = None
        self._is_adaptive = self.policy_name not in (*FIXED_DEPTH_POLICIES, OFF)
        self._previous_level = int(self.policy_name != OFF)

    def know_costs(self, costs: StepCosts) -> None:
        """As they were measured anew."""
        self.is_measured = True
        self.costs = LiveCosts(costs)
        self._choose = POLICIES.get(self.policy_name, self._choose)

    def know(self, proposers: Collection[ProposerTraits]) -> None:
        self.has_model = not all(each.may_offer_less for each in proposers)
        for each in proposers:
            self._hazards[each.name] = Hazards()
            if each.may_offer_less:
                self._looks_up.add(each.name)
            if each.keeps_kv:
                self._with_kv.add(each.name)

    # -- load ---------------------------------------------------------------------------------

    def arrive(self, arrival_s: float) -> None:
        self._arrivals.append(arrival_s)

    def end(self, request: Request) -> None:
        self._refusal = None  # which would hold on to it
        spent_s = max(self.now_s - request.arrival_s, 0.0)
        self._residence_s += _SLOWLY * (spent_s - self._residence_s)

    def tick(self, now_s: float) -> None:
        self.now_s = now_s

    @property
    def arrivals_per_s(self) -> float:
        """Over the last requests, and less the longer none has come."""
        if len(self._arrivals) < 2:
            return 0.0
        window_s = max(self.now_s, self._arrivals[-1]) - self._arrivals[0]
        return len(self._arrivals) / window_s if window_s > 0 else 0.0

    @property
    def load(self) -> float:
        return self.arrivals_per_s * self._residence_s / self._seats

    # -- planning -----------------------------------------------------------------------------

    def prompt_room(self, num_decoding: int, budget: int) -> int:
        """Prompt tokens that may go along with so many decode rows."""
        limit_s = self._step_limit_s
        if not num_decoding or limit_s is None or not self.is_measured:
            return budget
        table, low, high = self.costs.now.verify, min(_LEAST_PROMPT_TOKENS, budget), budget
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
        """Whether it may draft at all as things are set; a depth of its own outdoes the policy."""
        return self.max_depth != 0 and (self.policy_name != OFF or request.is_depth_fixed)

    @property
    def wants_prompts(self) -> bool:
        """Whether prompts are computed by the draft as well, as their rows will draft."""
        return self._previous_level > 0

    def choose(
        self, step: int, room: int, num_prompt_tokens: int, num_waiting: int, rows: Candidates
    ) -> Choice:
        hazards = self._hazards
        if step % _REFRESH_EVERY == 0:
            for each in hazards.values():
                each.refresh()
        self._prompt_tokens += _SLOWLY * (num_prompt_tokens - self._prompt_tokens)
        self._prompt_share += _SLOWLY * ((num_prompt_tokens > 0) - self._prompt_share)
        costs = self.costs.now
        refusal = self._refusal
        if refusal is not None and not num_prompt_tokens and self._stands(refusal, step, rows):
            self.steps_without += 1
            return refusal.choice
        is_fixed = [request.is_depth_fixed for request in rows.requests]
        self._is_asked = any(
            wanted and not fixed for wanted, fixed in zip(rows.wanted, is_fixed, strict=True)
        )
        with_kv = self._with_kv
        behind = [
            each if name in with_kv else 0
            for each, name in zip(rows.behind, rows.proposers, strict=True)
        ]
        can_stop = step % _SELECT_ALL_EVERY > 0 and self._can_stop(rows, num_prompt_tokens)
        # How sure a draft is tells of the text as it is now, which otherwise luck has to.
        trust = _TRUST_IF_SURE if can_stop else 1.0
        snapshot = DepthSnapshot(
            step,
            room,
            num_prompt_tokens,
            num_waiting,
            rows.proposers,
            rows.wanted,
            behind,
            is_fixed if any(is_fixed) else (),
            [
                hazards[name].survivals(request.luck, depth, trust) if depth else ()
                for request, name, depth in zip(
                    rows.requests, rows.proposers, rows.wanted, strict=True
                )
            ],
            rows.context,
            costs,
            self._prompt_tokens * costs.prefill_s + self._prompt_share * costs.first_draft.at(1),
            self._previous_level,
            self.load,
            self.acceptance,
            self.selection_gain if step % _SELECT_ALL_EVERY else 0.0,
            can_stop=can_stop,
            only_looks_up=self._looks_up.issuperset(rows.proposers),
        )
        choice = self._choose(snapshot)
        self._follow(choice)
        self._refusal = None
        if self._is_adaptive and not self._previous_level:
            is_usual = not num_prompt_tokens and snapshot.selection_gain == self.selection_gain
            # Others are cheap to ask, and may go by the number of the step; and depths that are
            # fixed are nobody's to refuse.
            if is_usual and self.policy_name == GOODPUT and not any(is_fixed):
                self._refusal = _Refusal(list(rows.requests), choice, costs, step)
            return self._explore(choice, step, rows)
        return choice

    def _stands(self, refusal: _Refusal, step: int, rows: Candidates) -> bool:
        """Weighing takes a fortieth of a small model's pass, and its end would be the same."""
        return (
            self.costs.now is refusal.costs
            and step < refusal.step + _KEPT_STEPS
            and step % _EXPLORE_EVERY > 0
            and len(rows.requests) == len(refusal.requests)
            and all(map(is_, rows.requests, refusal.requests))
        )

    def _can_stop(self, rows: Candidates, num_prompt_tokens: int) -> bool:
        """Whether a row's own confidence may end its drafting: where it is the only one that a step
        is for, and passes are not padded, so that a draft less makes both passes shorter."""
        return (
            self._can_select
            and len(rows.requests) == 1
            and not num_prompt_tokens
            and not rows.requests[0].is_depth_fixed
            and rows.proposers[0] in self._with_kv
            and not self.costs.now.verify.is_padded
        )

    def _follow(self, choice: Choice) -> None:
        level = max(choice.depths, default=0) if choice.level is None else choice.level
        self.steps_without = 0 if level else self.steps_without + 1
        self._previous_level = level
        if choice.candidates and choice.chosen is not None:
            plain = choice.candidates[0].tokens_per_s
            gain = choice.chosen.tokens_per_s / plain if plain else 1.0
            self.gain += _SLOWLY * (gain - self.gain)

    def _explore(self, choice: Choice, step: int, rows: Candidates) -> Choice:
        """A proposer without KV cannot be asked what it would have guessed: now and then one row
        drafts one token."""
        if step % _EXPLORE_EVERY:
            return choice
        count = len(rows.requests)
        start = step // _EXPLORE_EVERY % max(count, 1)
        for index in (*range(start, count), *range(start)):
            if rows.wanted[index] and rows.proposers[index] not in self._with_kv:
                depths = list(choice.depths)
                depths[index] = 1
                return Choice(depths, choice.num_selected, choice.chosen, choice.candidates)
        return choice

    def probes(self, rows: Candidates) -> Sequence[int]:
        """While nothing is drafted: which row's draft catches up, to tell what it would have
        guessed; as often as the time for it allows, and only where that tells enough. Rows new to
        it and rows it follows take turns, so that neither old texts nor new ones go unseen."""
        if not self._is_adaptive or self._previous_level or not self.is_measured:
            return ()
        with_kv = self._with_kv
        followed, least_known, new = -1, 0.0, -1
        for index, request in enumerate(rows.requests):
            if not rows.wanted[index] or rows.proposers[index] not in with_kv:
                continue
            done = request.draft.planned
            if done < request.prompt_len:
                new = index  # the youngest of these has most of its output to come
            elif len(request.tokens) - done >= _PROBE_TOKENS and (
                followed < 0 or request.luck.reached < least_known
            ):
                followed, least_known = index, request.luck.reached
        if followed < 0 and new < 0:
            return ()
        costs = self.costs.now
        cost_s = _PROBE_TOKENS * costs.prefill_s + costs.first_draft.at(1)
        chosen = followed
        if new >= 0 and (followed < 0 or self._is_turn_of_new):
            chosen, request = new, rows.requests[new]
            missing = request.prompt_len - request.draft.planned
            cost_s = missing * costs.prefill_s + costs.first_draft.at(1)
        if cost_s > self._probe_budget_s:
            return ()
        self._probe_budget_s = min(self._probe_budget_s, 2 * cost_s) - cost_s
        self._is_turn_of_new = chosen == followed
        return (chosen,)

    # -- learning -----------------------------------------------------------------------------

    def see_row(self, request: Request, num_verified: int, num_accepted: int) -> None:
        hazards = self._hazards.get(request.proposer)
        if num_verified:
            self._refusal = None
        if hazards is not None:
            hazards.see_round(request.luck, num_verified, num_accepted)

    def see_agreement(self, request: Request, agreement: Agreement) -> None:
        hits = agreement.hits
        hazards = self._hazards.get(request.proposer)
        if hazards is None or not hits:
            return
        self._refusal = None
        hazards.see_agreement(request.luck, hits)
        share = sum(hits) / len(hits)
        known = share if self.agreement is None else self.agreement
        self.agreement = known + 0.1 * (share - known)

    def see_step(
        self, record: StepRecord, verdict: Verdict, committed: int, verified: int, accepted: int
    ) -> None:
        record.committed = committed
        record.draft_s, record.verify_s = verdict.draft_s, verdict.verify_s
        if self._is_asked:  # or requests that do not ask would pay for the next one that does
            spent_s = verdict.draft_s + verdict.verify_s
            self._probe_budget_s = min(
                self._probe_budget_s + _PROBE_SHARE * spent_s, _LARGEST_PROBE_BUDGET_S
            )
        if verified:
            self.acceptance += _SLOWLY * (accepted / verified - self.acceptance)
        if not self.is_measured:
            return
        chosen, may_stop = record.choice.chosen, record.choice.least_survival > 0
        if may_stop:  # how many were drafted is how many were verified
            self.costs.see_verify(record.num_rows + verified, record.context, verdict.verify_s)
            if verified and not record.num_caught_up:
                self.costs.see_draft(self.costs.now.drafting_s(verified), verdict.draft_s)
            return
        num_tokens = record.num_tokens
        if not self.costs.now.verify.is_padded:  # a proposer may have offered less than planned
            num_tokens = record.num_rows + record.num_prompt_tokens + verified
        self.costs.see_verify(num_tokens, record.context, verdict.verify_s)
        if chosen is None:
            return
        is_as_chosen = record.num_drafts == chosen.num_drafts
        if is_as_chosen and chosen.num_drafts and not record.num_caught_up:
            self.costs.see_draft(chosen.draft_s, verdict.draft_s)
            if chosen.num_verified < chosen.num_drafts:
                self._see_selection(chosen, record.num_rows, accepted)

    def _see_selection(self, chosen: Candidate, num_rows: int, accepted: int) -> None:
        """Whether the drafts selected held as many right ones as thought."""
        share = chosen.num_verified / chosen.num_drafts
        promised = (chosen.tokens - num_rows) / share ** (1 - self.selection_gain)
        if promised > 0 and share < 0.9:
            found = max(min(accepted / promised, 1.0), 0.01)
            gain = 1 - log(found) / log(share)
            self.selection_gain += _SLOWLY * (min(max(gain, 0.0), _MOST_GAIN) - self.selection_gain)
            self.selection_gain = max(self.selection_gain, 0.01)  # so that it is tried again
