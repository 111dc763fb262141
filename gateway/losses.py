"""How often a request may lose its engine.

Each loss is made up for by another engine, but a request that takes every engine down with it must
not do so for ever.
"""

from __future__ import annotations

from outrider.gateway.errors import UnavailableError

MAX_FRUITLESS = 3  # in a row, without a token between them
# Likewise with hardly a token: what ends an engine at its second step gets one of each before.
MAX_EARLY = 8
EARLY_TOKENS = 16


class Losses:
    """Those of one request."""

    def __init__(self) -> None:
        self._num_before = 0
        self._fruitless = self._early = 0

    def begin(self, num_tokens: int) -> None:
        """So many tokens its reader had before."""
        self._num_before = num_tokens

    def see(self, num_tokens: int) -> None:
        """Lost once more, with so many tokens by now. Raises `UnavailableError` if it is enough."""
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
