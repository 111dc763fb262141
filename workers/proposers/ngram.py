"""n-gram (prompt) lookup: drafts what followed the last tokens at their previous occurrence."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.catalog.proposers import NGRAM
from outrider.scheduler.types import Agreement, Proposal, RowVerdict, StepPlan, Verdict
from outrider.workers.proposers.base import Proposer
from outrider.workers.rows import RowTable

_FIRST_TRUST = 1
# Replayed acceptance is reported in batches, as each report makes the policy reweigh all rows; or
# at once when the text seems to repeat itself.
_REPORT_TOKENS, _REPORT_HITS = 16, 2


class NgramIndex:
    """The last end of every n-gram of a growing text; each token is indexed once."""

    __slots__ = ("_ends", "_max_n", "_min_n", "_size")

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._ends: dict[tuple[int, ...], int] = {}
        self._size = 0  # tokens indexed

    def extend(self, tokens: list[int], length: int | None = None) -> None:
        """Index all n-grams whose successor is within the first `length` tokens, or within all."""
        length = len(tokens) if length is None else length
        for end in range(self._size + 1, length):
            for n in range(self._min_n, min(self._max_n, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._size = max(self._size, length - 1)

    def lookup(self, tokens: list[int], count: int) -> tuple[list[int], int]:
        """Up to `count` tokens that followed the longest known suffix, and its length.

        A continuation that reaches the end of the text wraps around, as a repetition would.
        """
        end, n = self._find(tokens, len(tokens))
        if not n:
            return [], 0
        text = tokens[end : end + count]
        period = len(tokens) - end
        while len(text) < count:
            text.append(text[len(text) - period])
        return text, n

    def next_after(self, tokens: list[int], length: int) -> int | None:
        """The first token that `lookup` would propose after the first `length` tokens; None if it
        would propose nothing."""
        end, n = self._find(tokens, length)
        return tokens[end] if n else None

    def _find(self, tokens: list[int], length: int) -> tuple[int, int]:
        """The previous end of the longest known suffix of the first `length` tokens, and its size;
        0 if none is known."""
        for n in range(min(self._max_n, length), self._min_n - 1, -1):
            end = self._ends.get(tuple(tokens[length - n : length]))
            if end is not None:
                return end, n
        return 0, 0


class _RowState:
    __slots__ = ("replayed", "generation", "index", "offered", "trust")

    def __init__(self, generation: int, index: NgramIndex) -> None:
        self.generation = generation
        self.index = index
        self.offered = 0
        self.trust = _FIRST_TRUST
        self.replayed: list[bool] = []  # hits on undrafted tokens, where it had a proposal


class NgramProposer(Proposer):
    """n-gram proposals for rows that ask for them.

    A row's proposals grow while they are accepted and shrink to what was accepted when they are
    not: verifying a rejected token is not free on every device. The limit depends on earlier tokens
    only, as rejection sampling demands. For tokens that a row decodes without it, it replays
    acceptance.
    """

    def __init__(self, rows: RowTable, min_n: int, max_n: int) -> None:
        self._rows = rows
        self._min_n = min_n
        self._max_n = max_n
        self._states: dict[int, _RowState] = {}
        self._own: set[int] = set()  # rows of this proposer, drafting or not
        self._agreements: list[Agreement] = []

    def follow(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        for row in plan.released:
            self._states.pop(row, None)
            self._own.discard(row)
        self._own.update(init.row for init in plan.admitted if init.proposer == NGRAM)

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
        for row in verdict.rows if self._own or self._states else ():
            if not row.num_verified:
                if row.row in self._own:
                    self._replay(row)
                continue
            state = self._states.get(row.row)
            if state is None or state.generation != row.generation:
                continue
            if row.num_accepted == row.num_verified:
                state.trust = max(state.trust, 2 * row.num_verified)
            else:
                state.trust = row.num_accepted + 1

    def take_agreements(self) -> tuple[Agreement, ...]:
        """Excludes tokens without a proposal: they cost nothing either."""
        agreements, self._agreements = tuple(self._agreements), []
        return agreements

    def _replay(self, verdict: RowVerdict) -> None:
        """Compare what was committed with what it would have proposed."""
        number, generation, base_len = verdict.row, verdict.generation, verdict.base_len
        if not verdict.tokens or not self._rows.is_current(number, generation):
            return
        state = self._state(number, generation)
        tokens, replayed = self._rows[number].tokens, state.replayed
        for length in range(base_len, base_len + len(verdict.tokens)):
            state.index.extend(tokens, length)
            guess = state.index.next_after(tokens, length)
            if guess is not None:
                replayed.append(guess == tokens[length])
        if len(replayed) >= _REPORT_TOKENS or (
            len(replayed) >= _REPORT_HITS and all(replayed[-_REPORT_HITS:])
        ):
            self._agreements.append(Agreement(number, generation, tuple(replayed)))
            state.replayed = []

    def _state(self, row: int, generation: int) -> _RowState:
        state = self._states.get(row)
        if state is None or state.generation != generation:
            state = _RowState(generation, NgramIndex(self._min_n, self._max_n))
            self._states[row] = state
        return state
