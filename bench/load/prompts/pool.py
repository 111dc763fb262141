"""Pieces of natural text of a given length, told apart by a number.

Prompts made to a length are cut from the bundled texts, so that a draft model has something to
guess at. A piece begins with its number, written in two units of the same texts: pieces with
different numbers differ from their start, and a server can share exactly what is meant to be
shared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from outrider.bench.load.asks import Prompt
from outrider.bench.load.files import DATA, json_rows, whole_text
from outrider.bench.load.prompts.bundled import SETS, SPEC_BENCH
from outrider.bench.load.prompts.found import WORDS_PER_TOKEN, encode

Unit = TypeVar("Unit", int, str)

SONNETS = DATA / "sonnet" / "sonnet.txt"


@dataclass(frozen=True)
class Pool(Generic[Unit]):
    """The bundled texts as one row of units: token ids, or words where there is no tokenizer."""

    units: Sequence[Unit]
    marks: Sequence[Unit]  # the digits of numbers: plain words of the texts, each once

    def piece(self, kind: str, number: int, length: int, seed: int) -> list[Unit]:
        """`length` units, the same whenever asked for; numbers below `len(marks)²` are distinct."""
        base = len(self.marks)
        shift, start = _hashed(f"{seed} {kind}"), _hashed(f"{seed} {kind} {number}")
        # Multiplying by what shares no factor with the base spreads numbers and keeps them apart.
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
    """About the golden section of `size`, and without a common factor."""
    candidate = max(1, int(size * 0.6180339887))
    while math.gcd(candidate, size) != 1:
        candidate += 1
    return candidate


def _texts() -> list[str]:
    questions = [row["turns"][0] for _, row in json_rows(SPEC_BENCH, "the bundled file")]
    talks = [turn for found in SETS["oasst"]() for turn in found.prompt.turns]
    answers = [found.answer for found in SETS["oasst"]() if found.answer]
    return [whole_text(SONNETS), *questions, *talks, *answers]


@lru_cache(maxsize=1)
def word_pool() -> Pool[str]:
    words = "\n".join(_texts()).split()
    return Pool(words, sorted({word for word in words if _is_plain(word)}))


@lru_cache(maxsize=2)
def token_pool(tokenizer: Any) -> Pool[int]:
    special = set(tokenizer.all_special_ids)
    encoded = (encode(tokenizer, text.rstrip() + "\n\n") for text in _texts())
    ids = [each for text_ids in encoded for each in text_ids if each not in special]
    return Pool(ids, [each for each in sorted(set(ids)) if _is_plain(tokenizer.decode([each]))])


def _is_plain(text: str) -> bool:
    return text.strip().isalpha() and text.isascii()


@dataclass(frozen=True)
class Part:
    """A piece of a prompt: `tokens` of the text that kind and number stand for."""

    kind: str
    number: int
    tokens: int


def cut_prompt(
    prompt_id: str,
    category: str,
    parts: Sequence[Part],
    *,
    tokenizer: Any,
    seed: int,
    output_tokens: int | None = None,
) -> Prompt:
    """The parts one after another: token ids, or text by words where there is no tokenizer."""
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
