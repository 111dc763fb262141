"""An Aho-Corasick automaton over all stop strings of a request.

A state is the longest suffix of the text that is a prefix of a stop string. States are stored in
arrays to be small, since every request may have its own automaton: most states have one child,
which is the next number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopAutomaton:
    """`depth[state]` is the length of a state's prefix, `matched[state]` the length of the longest
    stop string that ends there, 0 if none does. State 0 is the empty prefix."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_empty = not stops
        self.depth = array("i", [0])
        self.matched = array("i", [0])
        self._letters = [""]
        self._parents = array("i", [-1])
        self._forks: dict[tuple[int, str], int] = {}  # children that are not the next number
        for stop in stops:
            self._add(stop)
        self._fallbacks = array("i", [0]) * len(self.depth)  # the next longest such suffix
        self._link()

    def step(self, state: int, letter: str) -> int:
        """The state after one more character; linear time over a whole text."""
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
        """Shorter prefixes first: a state's fallback follows from its parent's."""
        for state in sorted(range(1, len(self.depth)), key=self.depth.__getitem__):
            parent = self._parents[state]
            if parent:
                fallback = self.step(self._fallbacks[parent], self._letters[state])
                self._fallbacks[state] = fallback
                self.matched[state] = self.matched[state] or self.matched[fallback]
