"""Workers without tensors: they compute nothing and check every plan.

`FakeWorkers` implements the protocols of the step loop, so scheduler, engine and servers run on it
without a model. Its model is a hash of (text, seed). Its KV holds, for every slot, the hash of the
text up to the token written there: a plan that reads KV of another text, writes into a block that
another row uses, or reuses a row too early raises `BrokenPlan` in the pass where it happens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from outrider.catalog.heads import HeadKind
from outrider.catalog.proposers import DRAFT, NGRAM, info_of, kv_rule_of
from outrider.scheduler.types import (
    NO_PROPOSER,
    Agreement,
    DraftEvent,
    Proposal,
    RowInit,
    RowPlan,
    RowVerdict,
    StepPlan,
    Ticket,
    TokenLogprobs,
    Verdict,
)
from outrider.testing.fake_kv import FakeKV, require, text_hashes
from outrider.testing.fake_model import FakeModel, FakeRow
from outrider.workers.proposers.base import MAX_REPLAYED_TOKENS
from outrider.workers.selection import Offer, is_likely, select_drafts

HEAD = HeadKind.EAGLE3.value  # a head with state beside the target's KV


class _CatchUp(NamedTuple):
    """KV that the draft writes for a row once the plan's outcome is known."""

    row: int
    start: int
    hashes: Sequence[int]  # of the whole text up to there
    agreement: Agreement


class FakeWorkers:
    """Target and proposers in one: `propose`, `verify` and `observe` as the step loop calls them.

    `acceptance` decides which drafts are accepted: a rate, or the numbers accepted, row after row,
    in an endless cycle. n-gram rows propose a varying number of tokens, like real ones. Catch-up KV
    is written when the next plan comes; its output tokens are reported as replayed acceptance, at
    the rate that `acceptance` gives for a first draft. Rows with a head must have head state for
    the whole text.
    """

    def __init__(
        self,
        num_blocks: int,
        draft_blocks: int,
        block_size: int,
        *,
        max_num_batched_tokens: int,
        acceptance: float | Sequence[int] = 0.7,
        model: FakeModel | None = None,
        propose_s: float = 0.0,
        verify_s: float = 0.0,
    ) -> None:
        self.model = model or FakeModel()
        self.target_kv = FakeKV("target", num_blocks, block_size)
        self.draft_kv = FakeKV("draft", draft_blocks, block_size)
        self._budget = max_num_batched_tokens
        self._acceptance = acceptance
        self._propose_s = propose_s
        self._verify_s = verify_s
        self._rows: dict[int, FakeRow] = {}
        self._generations: dict[int, int] = {}
        self._epoch = self._step = -1
        self._num_scripted = 0
        self._has_draft = True
        self._behind: list[_CatchUp] = []
        self._agreements: list[Agreement] = []

    # -- the protocols of the step loop -----------------------------------------------------

    @property
    def lag(self) -> int:
        return 1

    @property
    def max_depth(self) -> int | None:
        return None

    def events(self) -> Sequence[DraftEvent]:
        return ()

    def propose(self, plan: StepPlan) -> Ticket:
        self._begin(plan)
        proposals: dict[int, Proposal] = {}
        for planned in plan.rows:
            row = self._rows[planned.row]
            is_lost = planned.draft_tokens > 0 and not self._has_draft
            if planned.draft_tokens and not is_lost:
                self._catch_up(planned, row)
            if planned.depth and not is_lost:
                confidences = self._confidences(planned, row, plan.least_survival)
                drafts = self._drafts(planned, row, len(confidences))
                proposals[planned.row] = Proposal(
                    planned.generation, len(row.tokens), drafts, confidences
                )
        if proposals and self._propose_s:
            time.sleep(self._propose_s)
        return Ticket(plan.step, proposals, self._propose_s)

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        self._begin(plan)
        proposals = [self._proposal(planned, ticket) for planned in plan.rows]
        offers = [
            Offer(each.confidences, min(planned.num_verified, len(each.tokens)))
            for planned, each in zip(plan.rows, proposals, strict=True)
        ]
        num_verified = select_drafts(offers, plan.num_selected)
        rows = tuple(map(self._verify_row, plan.rows, proposals, num_verified))
        if self._verify_s:
            time.sleep(self._verify_s)
        agreements, self._agreements = tuple(self._agreements), []
        return Verdict(plan.epoch, plan.step, rows, ticket.draft_s, self._verify_s, agreements)

    def observe(self, verdict: Verdict) -> None:
        """Nothing to do: the outcome is known when the pass has run."""

    def lose_draft(self) -> None:
        """The draft dies: its KV is lost, and its rows get no proposals."""
        self._has_draft = False
        self._behind = []
        for row in self._rows:
            self.draft_kv.close(row)
            self.draft_kv.open(row, 0)
            self._rows[row].drafted = 0

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """A new draft takes over the rows, which must be those of the target."""
        self._has_draft = True
        for init in rows:
            row = self._rows[init.row]
            require(init.generation == row.init.generation, f"row {init.row} is another request's")
            applied = list(init.token_ids)
            require(applied == row.tokens[: len(applied)], f"row {init.row} has another text")
            require(init.draft_cached == 0, f"row {init.row}: a new draft has nothing cached")

    # -- rows -------------------------------------------------------------------------------

    def _begin(self, plan: StepPlan) -> None:
        if (plan.epoch, plan.step) != (self._epoch, self._step):
            self._write_behind()
        if plan.epoch != self._epoch:
            for row in list(self._rows):
                self._close(row)
            self._epoch, self._step = plan.epoch, -1
            self._generations = {}
        if plan.step == self._step:
            return
        require(plan.step > self._step, f"plan {plan.step} comes after plan {self._step}")
        self._step = plan.step
        for row in plan.released:
            require(row in self._rows, f"row {row} is released but not in use")
            self._close(row)
        for init in plan.admitted:
            self._open(init)
        for row in plan.draft_released:
            self.draft_kv.close(row)
            self.draft_kv.open(row, 0)
        self._check_plan(plan)

    def _open(self, init: RowInit) -> None:
        row, length = init.row, len(init.token_ids)
        require(row not in self._rows, f"row {row} is admitted but still in use")
        newer = init.generation > self._generations.get(row, -1)
        require(newer, f"row {row} has generation {init.generation} again")
        cached = max(init.target_cached, init.draft_cached)
        require(cached < length, f"row {row}: {cached} of {length} tokens are cached")
        self._generations[row] = init.generation
        self._rows[row] = FakeRow(init)
        self.target_kv.open(row, init.target_cached)
        self.draft_kv.open(row, init.draft_cached if self._has_draft else 0)

    def _close(self, row: int) -> None:
        del self._rows[row]
        self.target_kv.close(row)
        self.draft_kv.close(row)

    def _check_plan(self, plan: StepPlan) -> None:
        named = {planned.row for planned in plan.rows}
        require(len(named) == len(plan.rows) > 0, f"plan {plan.step} is empty or repeats a row")
        drafts = sum(planned.num_verified for planned in plan.rows)
        if plan.num_selected is not None:
            drafts = min(drafts, plan.num_selected)
        target = sum(planned.num_tokens for planned in plan.rows) + drafts
        draft = sum(planned.draft_tokens for planned in plan.rows if not planned.depth)
        require(
            max(target, draft) <= self._budget,
            f"plan {plan.step} has {target} tokens, {draft} for the draft; {self._budget} may be",
        )
        for planned in plan.rows:
            self._check_row(planned)

    def _check_row(self, planned: RowPlan) -> None:
        where = f"row {planned.row}"
        require(planned.row in self._rows, f"{where} is planned but was never admitted")
        row = self._rows[planned.row]
        require(planned.generation == row.init.generation, f"{where} has another generation")
        end = self.target_kv.computed[planned.row] + planned.num_tokens
        length = len(row.tokens)
        require(planned.num_tokens > 0 and end <= length, f"{where}: {end} of {length} computed")
        require(planned.samples == (end == length), f"{where} samples at {end} of {length}")
        is_decode = planned.samples and planned.num_tokens == 1
        require(planned.depth == 0 or is_decode, f"{where} is a prompt chunk with drafts")
        has_proposer = planned.proposer != NO_PROPOSER
        require(has_proposer == (planned.depth > 0), f"{where}: depth and proposer disagree")
        is_own = not has_proposer or planned.proposer == row.init.proposer
        require(is_own, f"{where} is drafted for by {planned.proposer}, not by its own proposer")
        drafts = planned.proposer == DRAFT
        caught_up = 0 < planned.draft_tokens <= info_of(DRAFT).traits.max_behind
        require(not drafts or caught_up, f"{where} drafts from {planned.draft_tokens} tokens")
        require(planned.draft_tokens > 0 or not planned.draft_blocks, f"{where}: idle draft grows")

    # -- drafting ---------------------------------------------------------------------------

    def _catch_up(self, planned: RowPlan, row: FakeRow) -> None:
        kv = self.draft_kv
        kv.extend_table(planned.row, planned.draft_start, planned.draft_blocks)
        start = kv.computed[planned.row]
        end = min(start + planned.draft_tokens, len(row.tokens))
        if not planned.depth:
            exact = end == start + planned.draft_tokens
            require(exact, f"row {planned.row} is to catch up beyond its text")
        kv.computed[planned.row] = end
        if planned.depth:
            self._write(planned.row, start, row.hashes[:end])
            return
        first = max(start, row.init.prompt_len, end - MAX_REPLAYED_TOKENS)
        hits = tuple(self._guesses(row.hashes[position - 1]) for position in range(first, end))
        agreement = Agreement(planned.row, planned.generation, hits)
        self._behind.append(_CatchUp(planned.row, start, row.hashes[:end], agreement))

    def _write_behind(self) -> None:
        for row, start, hashes, agreement in self._behind:
            self._write(row, start, hashes)
            if agreement.hits:
                self._agreements.append(agreement)
        self._behind = []

    def _write(self, row: int, start: int, hashes: Sequence[int]) -> None:
        self.draft_kv.write(row, start, hashes[start:])
        self.draft_kv.read(row, hashes)

    def _guesses(self, text: int) -> bool:
        """Whether the draft would have guessed the target's token after this text."""
        chance = self._acceptance
        if not isinstance(chance, float):
            chance = sum(map(bool, chance)) / len(chance)
        return hash((text, 0, 3)) % 1000 < 1000 * chance

    def _confidences(self, planned: RowPlan, row: FakeRow, least_survival: float) -> list[float]:
        """One per draft token."""
        text, depth = row.hashes[-1], planned.depth
        if planned.proposer == NGRAM:
            depth = hash((text, 2)) % (depth + 1)
        confidences: list[float] = []
        while len(confidences) < depth and is_likely(confidences, least_survival):
            confidences.append(_confidence(text, len(confidences)))
        return confidences

    def _drafts(self, planned: RowPlan, row: FakeRow, depth: int) -> list[int]:
        """As many of the target's own tokens as `acceptance` says, then wrong ones."""
        drafts = self.model.continuation(row.hashes[-1], row.init.seed, depth)
        for index in range(self._num_agreeing(row.hashes[-1], depth), depth):
            drafts[index] = (drafts[index] + 1) % self.model.vocab_size
        if planned.proposer == DRAFT:
            self._draft_passes(planned.row, row, drafts)
        return drafts

    def _num_agreeing(self, text: int, depth: int) -> int:
        if isinstance(self._acceptance, float):
            agreeing = 0
            while agreeing < depth and hash((text, agreeing, 3)) % 1000 < 1000 * self._acceptance:
                agreeing += 1
            return agreeing
        scripted = self._acceptance[self._num_scripted % len(self._acceptance)]
        self._num_scripted += 1
        return min(scripted, depth)

    def _draft_passes(self, number: int, row: FakeRow, drafts: list[int]) -> None:
        """The draft computes KV of all its draft tokens but the last."""
        length = len(row.tokens)
        at_end = self.draft_kv.computed[number] == length
        require(at_end, f"row {number} is to draft before the draft has caught up")
        hashes = text_hashes(drafts[:-1], row.hashes[-1])
        self.draft_kv.write(number, length, hashes)
        self.draft_kv.read(number, row.hashes + hashes)
        row.drafted = len(drafts)

    # -- verifying --------------------------------------------------------------------------

    def _proposal(self, planned: RowPlan, ticket: Ticket) -> Proposal:
        """The proposal for the row at its current length, perhaps empty."""
        base_len = len(self._rows[planned.row].tokens)
        proposal = ticket.drafts_for(planned.row, planned.generation, base_len)
        if proposal is None or not planned.depth:
            return Proposal(planned.generation, base_len, (), ())
        return proposal

    def _verify_row(self, planned: RowPlan, proposal: Proposal, num_verified: int) -> RowVerdict:
        row, kv, number = self._rows[planned.row], self.target_kv, planned.row
        kv.extend_table(number, planned.target_start, planned.target_blocks)
        start, base_len = kv.computed[number], len(row.tokens)
        prompt_logprobs = _prompt_logprobs(row, start, planned.num_tokens)
        drafts = list(proposal.tokens[:num_verified])
        known = row.hashes[: start + planned.num_tokens]
        computed = known + text_hashes(drafts, known[-1])
        has_head = row.init.proposer == HEAD
        kv.write(number, start, computed[start:], beside=has_head)
        kv.read(number, computed, beside=has_head)
        if not planned.samples:
            kv.computed[number] += planned.num_tokens
            return RowVerdict(
                number, planned.generation, base_len, 0, 0, 0, (), (), prompt_logprobs
            )
        own = self.model.continuation(row.hashes[-1], row.init.seed, len(drafts) + 1)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == own[accepted]:
            accepted += 1
        kv.computed[number] = base_len + accepted
        if row.drafted:
            at = self.draft_kv.computed  # with what it was fed in this round
            at[number] = kv_rule_of(DRAFT)(at[number], 0, row.drafted, accepted, base_len)
            row.drafted = 0
        tokens = tuple(own[: accepted + 1])
        row.extend(tokens)
        wants_logprobs = row.init.params.logprobs is not None
        logprobs = tuple(map(_logprob, tokens)) if wants_logprobs else ()
        return RowVerdict(
            number,
            planned.generation,
            base_len,
            len(proposal.tokens),
            len(drafts),
            accepted,
            tokens,
            logprobs,
            prompt_logprobs,
        )


def _confidence(text: int, place: int) -> float:
    """Of the draft token at this place after the text: arbitrary, but reproducible."""
    return (1 + hash((text, place, 4)) % 1000) / 1000


def _prompt_logprobs(row: FakeRow, start: int, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    if row.init.params.prompt_logprobs is None:
        return ()
    end = min(start + num_tokens + 1, row.init.prompt_len)
    return tuple(map(_logprob, row.tokens[start + 1 : end]))


def _logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, ())
