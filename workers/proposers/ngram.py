"""Prompt lookup: what followed the last tokens the last time they stood in this text."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.scheduler.types import Proposal, StepPlan, Verdict
from outrider.workers.proposers.base import NGRAM
from outrider.workers.rows import RowTable

_FIRST_TRUST = 1


class NgramIndex:
    """Where every n-gram of a growing text ended last; each token is indexed once."""

    __slots__ = ("_ends", "_max_n", "_min_n", "_size")

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._ends: dict[tuple[int, ...], int] = {}
        self._size = 0  # tokens indexed

    def extend(self, tokens: list[int]) -> None:
        """Index all n-grams that end before the last token: what follows them is known."""
        for end in range(self._size + 1, len(tokens)):
            for n in range(self._min_n, min(self._max_n, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._size = max(self._size, len(tokens) - 1)

    def lookup(self, tokens: list[int], count: int) -> tuple[list[int], int]:
        """Up to `count` tokens that followed the longest known suffix, and its length.

        A continuation that reaches the end of the text goes on into itself, as a repetition
        would.
        """
        for n in range(min(self._max_n, len(tokens)), self._min_n - 1, -1):
            end = self._ends.get(tuple(tokens[-n:]))
            if end is not None:
                text = tokens[end : end + count]
                period = len(tokens) - end
                while len(text) < count:
                    text.append(text[len(text) - period])
                return text, n
        return [], 0


class _RowState:
    __slots__ = ("generation", "index", "offered", "trust")

    def __init__(self, generation: int, index: NgramIndex) -> None:
        self.generation = generation
        self.index = index
        self.offered = 0
        self.trust = _FIRST_TRUST


class NgramProposer:
    """n-gram proposals for rows that ask for them.

    A row's proposals grow while they are accepted and shrink to what was accepted when they are
    not: a verified token that is rejected is not free on every device. The limit depends on
    earlier tokens only, as rejection sampling demands.
    """

    def __init__(self, rows: RowTable, min_n: int, max_n: int) -> None:
        self._rows = rows
        self._min_n = min_n
        self._max_n = max_n
        self._states: dict[int, _RowState] = {}

    def follow(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        for row in plan.released:
            self._states.pop(row, None)

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        proposals: dict[int, Proposal] = {}
        for planned in plan.rows:
            if planned.proposer != NGRAM:
                continue
            tokens = self._rows[planned.row].tokens
            state = self._state(planned.row, planned.generation)
            state.index.extend(tokens)
            drafts, length = state.index.lookup(tokens, min(planned.depth, state.trust))
            state.offered = len(drafts)
            if drafts:
                confidence = length / (length + 1)
                proposals[planned.row] = Proposal(
                    planned.generation, len(tokens), drafts, [confidence] * len(drafts)
                )
        return proposals

    def observe(self, verdict: Verdict) -> None:
        self._rows.commit(verdict)
        for row in verdict.rows:
            state = self._states.get(row.row)
            if state is None or state.generation != row.generation or not row.num_verified:
                continue
            if row.num_accepted == row.num_verified:
                state.trust = max(state.trust, 2 * row.num_verified)
            else:
                state.trust = row.num_accepted + 1

    def _state(self, row: int, generation: int) -> _RowState:
        state = self._states.get(row)
        if state is None or state.generation != generation:
            state = _RowState(generation, NgramIndex(self._min_n, self._max_n))
            self._states[row] = state
        return state
