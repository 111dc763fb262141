"""Reads the prompts of a dataset spec, as `spec-bench:qa+rag` or `jsonl:mine.jsonl`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from outrider.errors import ConfigError
from outrider.loadtest.prompts.bundled import SETS, read_bundled, read_spec_bench
from outrider.loadtest.prompts.entries import (
    DatasetEntry,
    DatasetOptions,
    num_tokens,
    prompt_tokens,
    round_robin,
    with_unique_ids,
)
from outrider.loadtest.prompts.synthetic import read_random, read_shared_prefix, read_sonnet
from outrider.loadtest.prompts.user_files import read_jsonl, read_sharegpt, read_speed_bench
from outrider.loadtest.requests import Prompt

logger = logging.getLogger(__name__)

Reader = Callable[[DatasetOptions], Iterable[DatasetEntry]]

READERS: dict[str, Reader] = {
    "spec-bench": read_spec_bench,
    **{name: partial(read_bundled, name) for name in SETS},
    "sonnet": read_sonnet,
    "random": read_random,
    "shared-prefix": read_shared_prefix,
    "sharegpt": read_sharegpt,
    "speed-bench": read_speed_bench,
    "jsonl": read_jsonl,
}
SPECS = (
    "spec-bench[:TASK+TASK]",
    *(f"{name}[:CATEGORY+CATEGORY]" for name in ("mt-bench", "vicuna", "eagle")),
    *("humaneval", "gsm8k", "mbpp", "arena-hard", "oasst"),
    *("sonnet:LEN", "random:LEN[:COUNT]", "shared-prefix:PREFIX+OWN[:GROUPS]"),
    *("sharegpt:PATH", "speed-bench:PATH", "jsonl:PATH"),
)


def read_prompts(
    spec: str,
    *,
    tokenizer: Any = None,
    limit: int | None = None,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    vocab_size: int | None = None,
) -> list[Prompt]:
    """The prompts of a dataset (`SPECS`), with ids such as "spec-bench/81", stable across runs.

    `limit` takes that many, round-robin over categories. `seed` applies to synthetic prompts, not
    to the order of a dataset. Prompts longer than `max_prompt_tokens` (estimated from words
    without a `tokenizer`) are skipped and counted in the log. With a tokenizer, `output_tokens`
    is the length of the dataset's reference reply.
    """
    for name, value in (("limit", limit), ("max_prompt_tokens", max_prompt_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    name, _, argument = spec.strip().partition(":")
    reader = READERS.get(name.lower())
    if reader is None:
        raise ConfigError(f"prompts {spec!r} are unknown; choose from {', '.join(SPECS)}.")
    options = DatasetOptions(argument.strip(), tokenizer, limit, seed, vocab_size)
    entries = with_unique_ids(name.lower(), reader(options))
    _check_ids(entries, tokenizer, vocab_size, spec)
    if not entries:
        raise ConfigError(f"{spec} has no prompts; give a dataset with at least one.")
    kept = _short_enough(entries, limit, max_prompt_tokens, tokenizer, spec)
    return [_with_output_tokens(each, tokenizer) for each in kept]


def _check_ids(
    entries: list[DatasetEntry], tokenizer: Any, vocab_size: int | None, spec: str
) -> None:
    size = vocab_size or (None if tokenizer is None else len(tokenizer))
    if size is None:
        return
    for each in entries:
        if each.prompt.token_ids and max(each.prompt.token_ids) >= size:
            raise ConfigError(
                f"{spec}: prompt {each.prompt.id} has token id {max(each.prompt.token_ids)} but "
                f"the vocabulary has {size}; give the ids of this model's tokenizer."
            )


def _short_enough(
    entries: list[DatasetEntry],
    limit: int | None,
    max_tokens: int | None,
    tokenizer: Any,
    spec: str,
) -> list[DatasetEntry]:
    """Tokenizes only until the limit is reached: a whole dataset takes seconds."""
    num_long = 0

    def is_short(each: DatasetEntry) -> bool:
        nonlocal num_long
        is_long = max_tokens is not None and prompt_tokens(each.prompt, tokenizer) > max_tokens
        num_long += is_long
        return not is_long

    if limit is None:
        kept = list(filter(is_short, entries))
    else:
        kept = round_robin(entries, limit, is_short)
    if not kept:
        raise ConfigError(
            f"{spec}: all {len(entries)} prompts are longer than {max_tokens} tokens; raise "
            "max_prompt_tokens or choose another dataset."
        )
    if num_long:
        logger.warning(
            "%s: skipped %d prompts longer than %d tokens, kept %d",
            spec,
            num_long,
            max_tokens,
            len(kept),
        )
    return kept


def _with_output_tokens(entry: DatasetEntry, tokenizer: Any) -> Prompt:
    if tokenizer is None or entry.answer is None or entry.prompt.output_tokens is not None:
        return entry.prompt
    length = max(1, num_tokens(entry.answer, tokenizer))
    return dataclasses.replace(entry.prompt, output_tokens=length)
