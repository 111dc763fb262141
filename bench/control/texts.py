"""Texts as far as drafting sees them: which of their tokens a draft guesses.

A text does not depend on its drafts, so whether a draft guesses a token is settled beforehand:
every arm of a scenario meets the same requests, token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_BEYOND = 16  # tokens past the end that a draft may still reach for
_ALWAYS = 64  # more levels than anybody drafts


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and outputs, evenly spread from the first to the second."""

    prompt: tuple[int, int] = (30, 160)
    output: tuple[int, int] = (60, 220)


@dataclass(frozen=True, slots=True)
class Text:
    """One request. `levels[i]`: output token i is guessed by drafts that were right fewer than so
    many times before it in their round; `chances` are what a draft's confidence tells."""

    prompt_len: int
    output_len: int
    levels: tuple[int, ...]
    chances: tuple[float, ...]

    def accepted(self, start: int, depth: int) -> int:
        """How many drafts behind output token `start` are right."""
        levels, count = self.levels, 0
        while count < depth and levels[start + count] > count:
            count += 1
        return count


Chances = Callable[[np.random.Generator, int, int], Floats]
"""From (random, request, tokens): the chance that a first draft is right, by output token."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """A way of texts: `decay` is what every right draft takes from the chance of the next."""

    name: str
    chances: Chances
    decay: float = 1.0


@lru_cache(maxsize=40_000)
def make_text(kind: TextKind, lengths: Lengths, seed: int, request: int) -> Text:
    rng = np.random.default_rng((seed, request))
    prompt_len = int(rng.integers(*lengths.prompt, endpoint=True))
    output_len = int(rng.integers(*lengths.output, endpoint=True))
    size = output_len + _BEYOND
    chances = np.clip(kind.chances(rng, request, size), 0.0, 1.0)
    drawn = rng.random(size)
    if kind.decay == 1.0:
        levels = np.where(drawn < chances, _ALWAYS, 0)
    else:
        with np.errstate(divide="ignore"):
            reach = np.log(drawn / np.maximum(chances, 1e-12)) / np.log(kind.decay)
        levels = np.where(drawn < chances, np.minimum(np.floor(reach) + 1, _ALWAYS), 0)
    return Text(
        prompt_len,
        output_len,
        tuple(int(each) for each in levels),
        tuple(float(each) for each in chances),
    )


def _steady(mean: float) -> Chances:
    return lambda rng, request, size: np.full(size, mean)


def _varied(mean: float, weight: float) -> Chances:
    """Every request has its own chance; a small weight spreads them widely."""

    def chances(rng: np.random.Generator, request: int, size: int) -> Floats:
        return np.full(size, rng.beta(mean * weight, (1 - mean) * weight))

    return chances


def _halves(rng: np.random.Generator, request: int, size: int) -> Floats:
    """Of every two requests one has all its drafts accepted, the other none."""
    return np.full(size, float(rng.random() < 0.5))


def _drift_within(rng: np.random.Generator, request: int, size: int) -> Floats:
    """Stretches that are easy to guess, and stretches that are not, of about 60 tokens each."""
    found = np.empty(size)
    start, is_easy = 0, bool(rng.random() < 0.5)
    while start < size:
        end = start + int(rng.integers(30, 90))
        found[start:end] = 0.95 if is_easy else 0.1
        start, is_easy = end, not is_easy
    return found


def drift_between(period: int) -> Chances:
    """Requests that are easy to guess, then as many that are not."""

    def chances(rng: np.random.Generator, request: int, size: int) -> Floats:
        return np.full(size, 0.92 if request // period % 2 == 0 else 0.08)

    return chances


GOOD = TextKind("good", _steady(0.88))
SPEC_BENCH = TextKind("spec-bench", _varied(0.66, 6.0), 0.98)
HOT = TextKind("hot", _varied(0.45, 8.0), 0.95)
POOR = TextKind("poor", _varied(0.25, 8.0), 0.9)
RANDOM = TextKind("random", _steady(0.0))
HALVES = TextKind("halves", _halves)
DRIFT = TextKind("drift", _drift_within)
KINDS = (GOOD, SPEC_BENCH, HOT, POOR, RANDOM, HALVES, DRIFT)
