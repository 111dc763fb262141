"""How long the engine waits for the answer to a step before it takes a rank for hung.

A rank whose main thread hangs still sends heartbeats, from another thread; only the answer that
does not come tells.
"""

from __future__ import annotations

_MARGIN = 10.0  # times the slowest comparable step
_FADE = 0.9  # of what a slow step still counts after the next: a compilation is soon forgotten
_FIRST = 10.0  # times the least limit, for the first step of a size: kernels may be compiled
_UNKNOWN_TOKEN_S = 1.0  # a token of the very first step


class Patience:
    """Limits for steps, from how long steps of about as many tokens took. `least_s` is the
    shortest of them."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._slowest_s: dict[int, float] = {}  # by size, a power of two of tokens
        self._token_s = 0.0  # the most a token took, in a step of any size

    def limit_s(self, num_tokens: int) -> float:
        slowest_s = self._slowest_s.get(num_tokens.bit_length())
        if slowest_s is not None:
            return self._least_s + _MARGIN * slowest_s
        return _FIRST * self._least_s + num_tokens * (self._token_s or _UNKNOWN_TOKEN_S)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens was answered after so long."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, _FADE * self._slowest_s.get(size, 0.0))
        self._token_s = max(self._token_s, seconds / max(num_tokens, 1))
