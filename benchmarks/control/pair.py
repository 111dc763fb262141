"""A target and a draft that answer plans with verdicts without computing: the text decides which
draft tokens are accepted, the machine how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outrider.benchmarks.control.machines import CostError
from outrider.benchmarks.control.texts import Text
from outrider.catalog.proposers import DRAFT, kv_rule_of
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.types import (
    Agreement,
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Verdict,
)

_NOISE_AT_ONCE = 1024
_CONFIDENCE_NOISE = 0.1  # standard deviation from the acceptance probability


class _Row:
    __slots__ = ("draft_len", "generation", "length", "run", "text")

    def __init__(self, init: RowInit, text: Text) -> None:
        self.text = text
        self.generation = init.generation
        self.length = len(init.token_ids)
        self.draft_len = init.draft_cached
        self.run = 0  # correct predictions in a row while catching up


class SimulatedPair:
    """Tracks rows as real workers do, and asserts that plans agree."""

    def __init__(
        self,
        costs: StepCosts,
        cost_error: CostError,
        texts: Mapping[SampleId, Text],
        rng: np.random.Generator,
    ) -> None:
        self._costs = costs
        self._cost_error = cost_error
        self._texts = texts
        self._rng = rng
        self._noise: list[float] = []
        self._kv_rule = kv_rule_of(DRAFT)
        self.seconds = 0.0  # of the last step, without noise, which is the same for all arms
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan) -> Verdict:
        for init in plan.admitted:
            self._rows[init.row] = _Row(init, self._texts[init.sample_id])
        verified = self._select(plan)
        agreements: list[Agreement] = []
        tokens = caught_up = 0
        context = 0
        tile = self._costs.tile_tokens
        rows_by_depth: list[int] = []
        rows = []
        for index, planned in enumerate(plan.rows):
            row = self._rows[planned.row]
            count = planned.depth if verified is None else verified[index]
            tokens += planned.num_tokens + count
            context += row.length * (1 + count // tile)
            depth = planned.depth
            if depth:
                while len(rows_by_depth) < depth:
                    rows_by_depth.append(0)
                rows_by_depth[depth - 1] += 1
            elif planned.draft_tokens:
                caught_up += self._catch_up(row, planned, agreements)
            rows.append(self._verdict(row, planned, count))
        draft_s, verify_s = self._seconds(tokens, context, rows_by_depth, caught_up)
        return Verdict(plan.epoch, plan.step, tuple(rows), draft_s, verify_s, tuple(agreements))

    def _verdict(self, row: _Row, planned: RowPlan, num_verified: int) -> RowVerdict:
        base_len, depth = row.length, planned.depth
        if not planned.samples:
            return RowVerdict(planned.row, planned.generation, base_len, 0, 0, 0, ())
        accepted = 0
        if depth:
            behind = base_len - row.draft_len
            assert 0 < behind <= planned.draft_tokens, (behind, planned)
            if num_verified:
                accepted = row.text.accepted(base_len - row.text.prompt_len, num_verified)
            row.draft_len = self._kv_rule(row.draft_len, behind, depth, accepted, base_len)
            row.run = 0
        row.length += accepted + 1
        return RowVerdict(
            planned.row,
            planned.generation,
            base_len,
            depth,
            num_verified,
            accepted,
            (0,) * (accepted + 1),
        )

    def _catch_up(self, row: _Row, planned: RowPlan, agreements: list[Agreement]) -> int:
        """Agreement of the draft with each token whose KV it computes."""
        start, end = row.draft_len, row.draft_len + planned.draft_tokens
        assert end <= row.length, (end, row.length)
        row.draft_len = end
        first = row.text.prompt_len
        hits = []
        for position in range(max(start + 1, first), min(end + 1, row.length)):
            hit = row.text.draft_limits[position - first] > row.run
            row.run = row.run + 1 if hit else 0
            hits.append(hit)
        if hits:
            agreements.append(Agreement(planned.row, planned.generation, tuple(hits)))
        return planned.draft_tokens

    def _select(self, plan: StepPlan) -> list[int] | None:
        """The number of verified draft tokens by row; None: all of them."""
        num_selected = plan.num_selected
        if num_selected is None:
            return None
        offers = []
        for index, planned in enumerate(plan.rows):
            row = self._rows[planned.row]
            survival, start = 1.0, row.length - row.text.prompt_len
            for draft_index in range(planned.depth):
                error = _CONFIDENCE_NOISE * float(self._rng.standard_normal())
                survival *= min(
                    max(row.text.probabilities[start + draft_index] + error, 0.01), 0.99
                )
                offers.append((survival, index))
        offers.sort(reverse=True)
        counts = [0] * len(plan.rows)
        for _, index in offers[:num_selected]:
            counts[index] += 1
        return counts

    def _seconds(
        self, tokens: int, context: int, rows_by_depth: list[int], caught_up: int
    ) -> tuple[float, float]:
        costs = self._costs
        draft_s, rows = 0.0, 0
        for index in range(len(rows_by_depth) - 1, -1, -1):
            rows += rows_by_depth[index]
            draft_s += (costs.next_draft if index else costs.first_draft).at(rows)
        if caught_up:
            draft_s += costs.first_draft.at(1) + caught_up * costs.prefill_s
        verify_s = costs.verify.at(tokens) + context * costs.context_s
        if not self._noise:
            self._noise = self._draw_noise()
        factor = self._noise.pop()
        self.seconds = draft_s + verify_s
        return draft_s * factor, verify_s * factor

    def _draw_noise(self) -> list[float]:
        cost_error, rng = self._cost_error, self._rng
        factors = np.exp(cost_error.noise * rng.standard_normal(_NOISE_AT_ONCE))
        is_slow = rng.random(_NOISE_AT_ONCE) < cost_error.outliers
        return [float(each) for each in np.where(is_slow, factors * cost_error.slowdown, factors)]
