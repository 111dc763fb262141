"""Synthetic datasets of given lengths: random tokens, sonnets, and shared prefixes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from outrider.errors import ConfigError
from outrider.input_files import numbered_lines
from outrider.loadtest.prompts.entries import DatasetEntry, DatasetOptions, num_tokens
from outrider.loadtest.prompts.pool import SONNETS, PromptSegment, cut_prompt
from outrider.loadtest.requests import Prompt

MAX_LENGTH = 1_000_000  # tokens of a prompt
MAX_COUNT = 1_000_000  # prompts of a dataset
DEFAULT_COUNT = 256  # prompts, without a count or a limit
SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"
MIN_SONNET = 32  # tokens: the task and a line or two


def read_random(options: DatasetOptions) -> Iterator[DatasetEntry]:
    """`random:LEN`, `random:MIN-MAX`, either with `:COUNT`: uniformly random token ids.

    Special ids of the tokenizer are excluded. With only the vocabulary's size, so are its first
    and last eighth, where special ids usually are.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", options.argument)
    if match is None:
        raise ConfigError(
            f"random:{options.argument} is not understood; write random:LEN, random:MIN-MAX or "
            "either with :COUNT, as random:64-512:1000."
        )
    shortest = _within("random's length", match[1], MAX_LENGTH)
    longest = _within("random's length", match[2], MAX_LENGTH) if match[2] else shortest
    if longest < shortest:
        raise ConfigError(
            f"random:{options.argument} ends below its start; write the smaller first."
        )
    ids = _drawable_ids(options)
    rng = random.Random(f"random tokens {options.seed}")
    for number in range(_num_prompts("random", match[3], options)):
        drawn = tuple(rng.choices(ids, k=rng.randint(shortest, longest)))
        yield DatasetEntry(
            Prompt(id=str(number), category="random", token_ids=drawn, is_natural=False)
        )


def _drawable_ids(options: DatasetOptions) -> list[int] | range:
    if options.tokenizer is not None:
        special = set(options.tokenizer.all_special_ids)
        size = options.vocab_size or len(options.tokenizer)
        return [each for each in range(min(size, len(options.tokenizer))) if each not in special]
    if options.vocab_size is None:
        raise ConfigError(
            "random prompts need a vocabulary; give a tokenizer or the vocabulary's size."
        )
    ids = range(options.vocab_size // 8, options.vocab_size * 7 // 8)
    if not ids:
        raise ConfigError(f"a vocabulary of {options.vocab_size} tokens is too small to draw from.")
    return ids


def read_sonnet(options: DatasetOptions) -> Iterator[DatasetEntry]:
    """`sonnet:LEN` with an optional `:COUNT`: random lines of about LEN tokens in all."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", options.argument)
    if match is None:
        raise ConfigError(
            f"sonnet:{options.argument} is not understood; write sonnet:LEN or sonnet:LEN:COUNT, "
            "as sonnet:512."
        )
    length = _within("sonnet's length", match[1], MAX_LENGTH, lower=MIN_SONNET)
    lines = [line for _, line in numbered_lines(SONNETS)]
    sizes = [num_tokens(line, options.tokenizer) for line in lines]
    task = num_tokens(SONNET_TASK, options.tokenizer)
    rng = random.Random(f"sonnet {options.seed}")
    for number in range(_num_prompts("sonnet", match[2], options)):
        drawn, room = "", length - task
        while True:
            at = rng.randrange(len(lines))
            if sizes[at] > room and drawn:
                break
            drawn, room = drawn + lines[at], room - sizes[at]
        yield DatasetEntry(
            Prompt(id=str(number), category="sonnet", turns=(SONNET_TASK + drawn.rstrip(),))
        )


def read_shared_prefix(options: DatasetOptions) -> Iterator[DatasetEntry]:
    """`shared-prefix:PREFIX+OWN` with an optional `:GROUPS`, lengths in tokens.

    Prompts of a group share a prefix of PREFIX tokens, followed by OWN unique tokens. Groups (1
    by default) alternate.
    """
    match = re.fullmatch(r"(\d+)\+(\d+)(?::(\d+))?", options.argument)
    if match is None:
        raise ConfigError(
            f"shared-prefix:{options.argument} is not understood; write shared-prefix:PREFIX+OWN "
            "or shared-prefix:PREFIX+OWN:GROUPS, as shared-prefix:1024+64:8."
        )
    prefix = _within("the shared prefix", match[1], MAX_LENGTH)
    own = _within("the part after the prefix", match[2], MAX_LENGTH)
    groups = _within("the number of groups", match[3] or "1", MAX_COUNT)
    for number in range(options.limit or max(DEFAULT_COUNT, groups)):
        group = number % groups
        parts = [PromptSegment("prefix", group, prefix), PromptSegment("own", number, own)]
        yield DatasetEntry(
            cut_prompt(
                str(number),
                f"prefix {group}",
                parts,
                tokenizer=options.tokenizer,
                seed=options.seed,
            )
        )


def _num_prompts(name: str, count: str | None, options: DatasetOptions) -> int:
    if count is None:
        return options.limit or DEFAULT_COUNT
    return min(_within(f"{name}'s count", count, MAX_COUNT), options.limit or MAX_COUNT)


def _within(what: str, digits: str, upper: int, lower: int = 1) -> int:
    # Length is checked first: Python refuses to parse thousands of digits.
    value = int(digits) if len(digits) <= 12 else upper + 1
    if not lower <= value <= upper:
        raise ConfigError(f"{what} is {digits[:15]}; give {lower} to {upper}.")
    return value
