"""Simulated texts: which of their tokens a draft predicts.

A text does not depend on its drafts, so which draft tokens are accepted is drawn beforehand: every
arm of a scenario serves the same requests, token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_PADDING = 16  # tokens behind the end, which a draft may still propose
_MAX_DRAFTS = 64  # deeper than any policy drafts
_RECORDED = Path(__file__).with_name("recorded.jsonl")


@dataclass(frozen=True, slots=True)
class LengthRanges:
    """Bounds of uniformly distributed prompt and output lengths, in tokens."""

    prompt: tuple[int, int] = (30, 160)
    output: tuple[int, int] = (60, 220)


@dataclass(frozen=True, slots=True)
class Text:
    """One request. The draft predicts output token i if it drafted fewer than `draft_limits[i]`
    tokens before it in the round; `probabilities` are its confidence."""

    prompt_len: int
    output_len: int
    draft_limits: tuple[int, ...]
    probabilities: tuple[float, ...]

    def accepted(self, start: int, depth: int) -> int:
        """The number of accepted draft tokens from output token `start` on."""
        draft_limits, count = self.draft_limits, 0
        while count < depth and draft_limits[start + count] > count:
            count += 1
        return count


Probabilities = Callable[[np.random.Generator, int, int], Floats]
"""From (random, request, tokens): the acceptance probability of a first draft token, by output
token."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """A kind of text; in a round each accepted draft token multiplies the probability of the next
    by `decay`."""

    name: str
    probabilities: Probabilities | None  # None: recorded texts
    decay: float = 1.0


@lru_cache(maxsize=40_000)
def make_text(kind: TextKind, lengths: LengthRanges, seed: int, request: int) -> Text:
    rng = np.random.default_rng((seed, request))
    prompt_len = int(rng.integers(*lengths.prompt, endpoint=True))
    output_len = int(rng.integers(*lengths.output, endpoint=True))
    size = output_len + _PADDING
    if kind.probabilities is None:
        return _recorded_text(lengths.prompt, output_len, seed, request)
    probabilities = np.clip(kind.probabilities(rng, request, size), 0.0, 1.0)
    uniform = rng.random(size)
    if kind.decay == 1.0:
        draft_limits = np.where(uniform < probabilities, _MAX_DRAFTS, 0)
    else:
        with np.errstate(divide="ignore"):
            reach = np.log(uniform / np.maximum(probabilities, 1e-12)) / np.log(kind.decay)
        draft_limits = np.where(
            uniform < probabilities, np.minimum(np.floor(reach) + 1, _MAX_DRAFTS), 0
        )
    return Text(
        prompt_len,
        output_len,
        tuple(int(each) for each in draft_limits),
        tuple(float(each) for each in probabilities),
    )


@lru_cache(maxsize=1)
def _recorded() -> list[tuple[int, tuple[int, ...], tuple[float, ...]]]:
    """See `record.py`: of each text the prompt's length, draft limits and confidences."""
    found = []
    with _RECORDED.open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            limits = tuple(_MAX_DRAFTS * int(hit) for hit in line["hits"])
            confidences = tuple(int(tenths) / 10 + 0.05 for tenths in line["confidences"])
            found.append((line["prompt"], limits, confidences))
    return found


def _recorded_text(prompts: tuple[int, int], output_len: int, seed: int, request: int) -> Text:
    """One with such a prompt. Each seed has an order of its own, in which no text comes twice
    before all have come."""
    texts = [each for each in _recorded() if prompts[0] <= each[0] <= prompts[1]]
    order = np.random.default_rng((seed, 3, request // len(texts))).permutation(len(texts))
    prompt_len, limits, confidences = texts[order[request % len(texts)]]
    output_len = min(output_len, len(limits))
    padding = (0,) * _PADDING
    return Text(prompt_len, output_len, limits + padding, confidences + padding)


def _steady(mean: float) -> Probabilities:
    return lambda rng, request, size: np.full(size, mean)


def _varied(mean: float, weight: float) -> Probabilities:
    """Every request has its own probability; a small weight spreads them widely."""

    def probabilities(rng: np.random.Generator, request: int, size: int) -> Floats:
        return np.full(size, rng.beta(mean * weight, (1 - mean) * weight))

    return probabilities


def _halves(rng: np.random.Generator, request: int, size: int) -> Floats:
    """All drafts of half the requests are accepted, and none of the others'."""
    return np.full(size, float(rng.random() < 0.5))


def _drift_within(rng: np.random.Generator, request: int, size: int) -> Floats:
    """Stretches of about 60 tokens, easy and hard to draft."""
    found = np.empty(size)
    start, is_easy = 0, bool(rng.random() < 0.5)
    while start < size:
        end = start + int(rng.integers(30, 90))
        found[start:end] = 0.95 if is_easy else 0.1
        start, is_easy = end, not is_easy
    return found


def drift_between(period: int) -> Probabilities:
    """`period` requests that are easy to draft, then as many that are hard."""

    def probabilities(rng: np.random.Generator, request: int, size: int) -> Floats:
        return np.full(size, 0.92 if request // period % 2 == 0 else 0.08)

    return probabilities


GOOD = TextKind("good", _steady(0.88))
SPEC_BENCH = TextKind("spec-bench", _varied(0.66, 6.0), 0.98)
HOT = TextKind("hot", _varied(0.45, 8.0), 0.95)
POOR = TextKind("poor", _varied(0.25, 8.0), 0.9)
RANDOM = TextKind("random", _steady(0.0))
HALVES = TextKind("halves", _halves)
DRIFT = TextKind("drift", _drift_within)
RECORDED = TextKind("recorded", None)
"""The bundled pair over Spec-Bench, greedy."""
KINDS = (GOOD, SPEC_BENCH, HOT, POOR, RANDOM, HALVES, DRIFT)
