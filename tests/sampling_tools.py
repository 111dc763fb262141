"""What the sampling tests share: samplers made from keywords, and a model without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet

from outrider.scheduler.params import SamplingParams
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler

CPU = torch.device("cpu")


def rest_thorough(names: Iterable[str], *, fast: str) -> list[ParameterSet]:
    """Parameters of a test, of which `make test-fast` takes only one."""
    return [pytest.param(n, marks=() if n == fast else pytest.mark.thorough) for n in names]


def make_sampler(
    vocab_size: int,
    seed: int = 0,
    prompt_len: int = 0,
    stop_ids: Sequence[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
    **params: Any,
) -> RowSampler:
    return RowSampler(
        SamplingParams(**params), seed, prompt_len, stop_ids, bad_word_ids, vocab_size, CPU
    )


def with_seed(sampler: RowSampler, seed: int) -> RowSampler:
    """A copy that shares everything but the seed; `copy.copy` is too slow for 100,000 of them."""
    clone = object.__new__(RowSampler)
    clone.__dict__.update(sampler.__dict__)
    clone.seed = seed
    return clone


class PrefixModel:
    """A "language model" whose logits are a fixed random function of the whole prefix."""

    def __init__(self, vocab_size: int, name: str = "target", spread: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self._name = name
        self._spread = spread
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        key = tuple(prefix)
        if key not in self._known:
            digest = hashlib.blake2b(f"{self._name}{key}".encode(), digest_size=8).digest()
            generator = np.random.default_rng(int.from_bytes(digest, "little"))
            values = generator.normal(scale=self._spread, size=self.vocab_size)
            self._known[key] = values.astype(np.float32)
        return self._known[key]

    def span_logits(self, span: LogitSpan) -> list[np.ndarray]:
        """What a target pass gives: one row per draft, and one more."""
        text = [*span.tokens, *span.drafts]
        return [self(text[: span.base_len + j]) for j in range(span.num_rows)]

    def batch_logits(self, spans: Sequence[LogitSpan]) -> torch.Tensor:
        rows = [row for span in spans for row in self.span_logits(span)]
        return torch.from_numpy(np.stack(rows))


def decode_plainly(
    model: PrefixModel, sampler: RowSampler, prompt: Sequence[int], num_tokens: int, ops: Any
) -> list[int]:
    """One token after the other, no drafts: the text that speculation must reproduce."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        span = LogitSpan(sampler, tokens)
        tokens = [*tokens, int(sample(model.batch_logits([span]), [span], ops)[0])]
    return tokens[len(prompt) :]
