"""Natural text of a given length, unique by a number.

Prompts of a given length are cut from the bundled texts, so that a draft model can predict them.
Each piece begins with its number, encoded in two units of the same texts: pieces with different
numbers differ from the start, so a prefix cache shares exactly the intended prefixes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from outrider.input_files import json_rows, whole_text
from outrider.loadtest.bundled_data import DATA
from outrider.loadtest.prompts.bundled import SETS, SPEC_BENCH
from outrider.loadtest.prompts.entries import WORDS_PER_TOKEN, encode
from outrider.loadtest.requests import Prompt

Unit = TypeVar("Unit", int, str)

SONNETS = DATA / "sonnet" / "sonnet.txt"


@dataclass(frozen=True)
class TextPool(Generic[Unit]):
    """The bundled texts as one sequence of units: token ids, or words without a tokenizer."""

    units: Sequence[Unit]
    marks: Sequence[Unit]  # digits that encode numbers: the distinct plain words of the texts

    def piece(self, kind: str, number: int, length: int, seed: int) -> list[Unit]:
        """`length` units, deterministic; numbers below `len(marks)²` give distinct pieces."""
        base = len(self.marks)
        shift, start = _hashed(f"{seed} {kind}"), _hashed(f"{seed} {kind} {number}")
        # Multiplication by a number coprime to the modulus is a bijection that spreads numbers.
        spread = _coprime(base * base)
        high, low = divmod((number * spread + shift) % (base * base), base)
        taken = [self.marks[high], self.marks[low]][:length]
        at = start % len(self.units)
        while len(taken) < length:
            taken += self.units[at : at + length - len(taken)]
            at = 0
        return taken


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache
def _coprime(size: int) -> int:
    """A number coprime to `size`, near its golden section."""
    candidate = max(1, int(size * 0.6180339887))
    while math.gcd(candidate, size) != 1:
        candidate += 1
    return candidate


def _texts() -> list[str]:
    questions = [row["turns"][0] for _, row in json_rows(SPEC_BENCH, "the bundled file")]
    talks = [turn for entry in SETS["oasst"]() for turn in entry.prompt.turns]
    answers = [entry.answer for entry in SETS["oasst"]() if entry.answer]
    return [whole_text(SONNETS), *questions, *talks, *answers]


@lru_cache(maxsize=1)
def word_pool() -> TextPool[str]:
    words = "\n".join(_texts()).split()
    return TextPool(words, sorted({word for word in words if _is_plain(word)}))


@lru_cache(maxsize=2)
def token_pool(tokenizer: Any) -> TextPool[int]:
    special = set(tokenizer.all_special_ids)
    encoded = (encode(tokenizer, text.rstrip() + "\n\n") for text in _texts())
    ids = [each for text_ids in encoded for each in text_ids if each not in special]
    return TextPool(ids, [each for each in sorted(set(ids)) if _is_plain(tokenizer.decode([each]))])


def _is_plain(text: str) -> bool:
    return text.strip().isalpha() and text.isascii()


@dataclass(frozen=True)
class PromptSegment:
    """A part of a prompt: `tokens` tokens of the piece of that kind and number."""

    kind: str
    number: int
    tokens: int


def cut_prompt(
    prompt_id: str,
    category: str,
    parts: Sequence[PromptSegment],
    *,
    tokenizer: Any,
    seed: int,
    output_tokens: int | None = None,
) -> Prompt:
    """Concatenates the segments: token ids, or words without a tokenizer."""
    if tokenizer is None:
        pool = word_pool()
        words = [
            word
            for part in parts
            for word in pool.piece(part.kind, part.number, num_words(part.tokens), seed)
        ]
        return Prompt(prompt_id, category, text=" ".join(words), output_tokens=output_tokens)
    tokens = token_pool(tokenizer)
    ids = [
        each for part in parts for each in tokens.piece(part.kind, part.number, part.tokens, seed)
    ]
    return Prompt(prompt_id, category, token_ids=tuple(ids), output_tokens=output_tokens)


def num_words(tokens: int) -> int:
    return max(1, round(tokens * WORDS_PER_TOKEN))
