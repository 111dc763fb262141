"""A language model that is a hash, and the text of each row."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.scheduler.types import RowInit
from outrider.testing.fake_kv import text_hashes


class FakeModel:
    """A language model that is a hash: deterministic in (text, seed)."""

    def __init__(self, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size

    def next_token(self, text: int, seed: int) -> int:
        """The model's choice after the text with this hash."""
        return hash((text, seed, 1)) % self.vocab_size

    def continuation(self, text: int, seed: int, count: int) -> list[int]:
        """`count` tokens of plain decoding: what every schedule must commit."""
        chosen: list[int] = []
        for _ in range(count):
            chosen.append(self.next_token(text, seed))
            text = hash((text, chosen[-1]))
        return chosen


class FakeRow:
    """A request on the fake workers."""

    __slots__ = ("drafted", "hashes", "init", "tokens")

    def __init__(self, init: RowInit) -> None:
        self.init = init
        self.tokens = list(init.token_ids)
        self.hashes = text_hashes(self.tokens)
        self.drafted = 0  # by the draft model in the current round

    def extend(self, tokens: Sequence[int]) -> None:
        self.hashes += text_hashes(tokens, self.hashes[-1])
        self.tokens += tokens
