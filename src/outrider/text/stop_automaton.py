"""All stop strings at once: how much of one a text ends with, a character at a time.

An Aho-Corasick automaton. A state is the longest end of the text that a stop string begins with.
It is held in arrays, as every request may bring one: stop strings are mostly chains of states
without a fork, whose next state is simply the next number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopAutomaton:
    """`depth[state]` is how many characters a state stands for, `matched[state]` the length of the
    longest stop string that ends there, 0 if none does. The first state, 0, stands for nothing."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_empty = not stops
        self.depth = array("i", [0])
        self.matched = array("i", [0])
        self._letters = [""]
        self._parents = array("i", [-1])
        self._forks: dict[tuple[int, str], int] = {}  # next states that are not the next number
        for stop in stops:
            self._add(stop)
        self._fallbacks = array("i", [0]) * len(self.depth)  # the next longest such end
        self._link()

    def step(self, state: int, letter: str) -> int:
        """The state behind one more character; over a whole text this takes linear time."""
        while (found := self._child(state, letter)) is None:
            if state == 0:
                return 0
            state = self._fallbacks[state]
        return found

    def _child(self, state: int, letter: str) -> int | None:
        follower = state + 1
        is_child = follower < len(self._parents) and self._parents[follower] == state
        if is_child and self._letters[follower] == letter:
            return follower
        return self._forks.get((state, letter))

    def _add(self, stop: str) -> None:
        state = 0
        for letter in stop:
            child = self._child(state, letter)
            if child is None:
                child = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
                self._letters.append(letter)
                self._parents.append(state)
                if child != state + 1:
                    self._forks[state, letter] = child
            state = child
        self.matched[state] = self.depth[state]

    def _link(self) -> None:
        """Shorter ends first: a state's fallback is found from its parent's."""
        for state in sorted(range(1, len(self.depth)), key=self.depth.__getitem__):
            parent = self._parents[state]
            if parent:
                fallback = self.step(self._fallbacks[parent], self._letters[state])
                self._fallbacks[state] = fallback
                self.matched[state] = self.matched[state] or self.matched[fallback]
