"""Batches of requests drawn at random, for the property every way of running must have: with
speculation, of any kind and whatever happens meanwhile, the texts are those of plain decoding.

A batch follows from its seed. It mixes greedy and sampled requests, every sampling parameter,
several samples of a prompt, all proposers, prompts that begin alike and prompts that repeat
themselves (for the lookup).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import kv_gb, random_prompt
from same_text import EOS, METHODS, PLAIN, TEMPERATURES, Asked

from outrider import SamplingParams
from outrider.text.outputs import RequestOutput

LIKELY = range(30, 90)
STOPS = (["te", "ss", "ol"], ["n"], ["ea", "the", "st"])
BAD_WORDS = (["e", "qu"], ["hat"], ["st", "on", "a"])


@dataclass(frozen=True)
class Batch:
    """How many requests there are, and how long they may become."""

    num_requests: int
    longest_prompt: int
    most_tokens: int
    most_samples: int = 3

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.most_tokens


# Takes a fraction of a second in one process.
BATCH = Batch(num_requests=10, longest_prompt=48, most_tokens=24)
BLOCK_SIZE = 8


def settings(batch: Batch, *folders: Path) -> Mapping[str, Mapping[str, Any]]:
    """Ways to schedule; where it is tight, there is memory for little more than one request."""
    room = kv_gb(batch.longest + BLOCK_SIZE, *folders, block_size=BLOCK_SIZE)
    tight = {"kv_cache_gb": room, "max_model_len": batch.longest}
    return {
        "in chunks": {"max_num_batched_tokens": 21, "max_num_seqs": 16},
        "tight": {**tight, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        "tight, in chunks": {**tight, "max_num_seqs": 5, "max_num_batched_tokens": 17},
    }


def seeds(usual: int, many: int) -> list[Any]:
    """Parameters of a test: a few for `make test`, the others for `make test-slow`."""
    return [
        pytest.param(seed, marks=() if seed < usual else (pytest.mark.slow,))
        for seed in range(many)
    ]


def assert_drafts_came_to_use(outputs: Iterable[RequestOutput]) -> None:
    records = [sample.speculation for output in outputs for sample in output.outputs]
    accepted = sum(record.accepted for record in records)
    assert 0 < accepted < sum(record.drafted for record in records)


def draw_requests(batch: Batch, seed: int) -> list[Asked]:
    draw = random.Random(seed)
    return [(_prompt(batch, draw, seed), _params(batch, draw)) for _ in range(batch.num_requests)]


def plainly(requests: list[Asked]) -> list[Asked]:
    """The same requests without speculation."""
    return [(prompt, replace(params, **PLAIN)) for prompt, params in requests]


def _prompt(batch: Batch, draw: random.Random, seed: int) -> list[int]:
    length = draw.randint(1, batch.longest_prompt)
    own = random_prompt(length, seed=draw.randrange(1000))
    kind = draw.choice(("own", "begins alike", "repeats itself"))
    if kind == "begins alike":
        shared = random_prompt(batch.longest_prompt, seed=seed)
        return [*shared[: draw.randrange(length)], *own][:length]
    if kind == "repeats itself":
        return (own[: 1 + length // 3] * 4)[:length]
    return own


def _params(batch: Batch, draw: random.Random) -> SamplingParams:
    """About a third of the parameters, each at a value at which it is felt."""
    max_tokens = draw.randint(1, batch.most_tokens)
    choices: dict[str, Any] = {
        "top_k": draw.choice((1, 4, 60)),
        "top_p": draw.choice((0.3, 0.8, 0.95)),
        "min_p": draw.choice((0.01, 0.2)),
        "presence_penalty": draw.choice((-1.0, 0.5, 2.0)),
        "frequency_penalty": draw.choice((-2.0, 0.4, 1.5)),
        "repetition_penalty": draw.choice((0.8, 1.2, 1.8)),
        "logit_bias": {draw.choice(LIKELY): 4.0, 200: -100.0, EOS: draw.choice((-5.0, 3.0))},
        "allowed_token_ids": sorted(draw.sample(range(2, 300), 120)),
        "bad_words": draw.choice(BAD_WORDS),
        "min_tokens": draw.randint(1, max_tokens),
        "stop": draw.choice(STOPS),
        "stop_token_ids": draw.sample(LIKELY, 20),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "n": draw.randint(2, batch.most_samples),
        "logprobs": draw.choice((0, 1, 3)),
        "prompt_logprobs": draw.choice((0, 2)),
    }
    chosen = {name: value for name, value in choices.items() if draw.random() < 0.3}
    method = draw.choice(list(METHODS.values()))
    return SamplingParams(
        temperature=draw.choice(TEMPERATURES),
        seed=draw.randrange(2**32),
        max_tokens=max_tokens,
        **chosen,
        **method,
    )
