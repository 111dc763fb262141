"""How often a request may lose its engine.

Each loss is retried on another engine; the limit stops a request that crashes every engine.
"""

from __future__ import annotations

from outrider.api_types.errors import UnavailableError

MAX_FRUITLESS = 3  # in a row, without a token between them
# In a row with few tokens: a request that crashes an engine at its second step gets one from each.
MAX_EARLY = 8
EARLY_TOKENS = 16


class EngineLosses:
    """Engine losses of one request."""

    def __init__(self) -> None:
        self._num_before = 0
        self._fruitless = self._early = 0

    def begin(self, num_tokens: int) -> None:
        """The client had this many tokens before."""
        self._num_before = num_tokens

    def see(self, num_tokens: int) -> None:
        """Count one more loss, at this many tokens; raises `UnavailableError` at the limit."""
        num_new, self._num_before = num_tokens - self._num_before, num_tokens
        self._fruitless = 0 if num_new else self._fruitless + 1
        self._early = 0 if num_new >= EARLY_TOKENS else self._early + 1
        if self._fruitless >= MAX_FRUITLESS:
            raise UnavailableError(
                f"the engine was lost {self._fruitless} times in a row without a token for "
                "this request; try again later."
            )
        if self._early >= MAX_EARLY:
            raise UnavailableError(
                f"the engine was lost {self._early} times in a row, each time within "
                f"{EARLY_TOKENS} tokens of this request; try again later."
            )
