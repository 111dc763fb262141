"""`read_prompts`: from a spec, as `spec-bench:qa+rag` or `jsonl:mine.jsonl`, to prompts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from outrider.bench.load.asks import Prompt
from outrider.bench.load.prompts.bundled import SETS, read_bundled, read_spec_bench
from outrider.bench.load.prompts.found import (
    Found,
    Wanted,
    in_turns,
    num_tokens,
    prompt_tokens,
    with_unique_ids,
)
from outrider.bench.load.prompts.given import read_jsonl, read_sharegpt, read_speed_bench
from outrider.bench.load.prompts.made import read_random, read_shared_prefix, read_sonnet
from outrider.errors import ConfigError

logger = logging.getLogger(__name__)

Reader = Callable[[Wanted], Iterable[Found]]

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
    """The prompts of a set (`SPECS`), with ids such as "spec-bench/81" that every run shares.

    `limit` takes that many, categories in turns. `seed` decides what is drawn, not the order of
    a set that exists. Prompts longer than `max_prompt_tokens` (estimated by words where there is
    no `tokenizer`) are left out and counted in the log. With a tokenizer, `output_tokens` is the
    length of the answer that the set gives.
    """
    for name, value in (("limit", limit), ("max_prompt_tokens", max_prompt_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    name, _, argument = spec.strip().partition(":")
    reader = READERS.get(name.lower())
    if reader is None:
        raise ConfigError(f"prompts {spec!r} are unknown; choose from {', '.join(SPECS)}.")
    wanted = Wanted(argument.strip(), tokenizer, limit, seed, vocab_size)
    found = with_unique_ids(name.lower(), reader(wanted))
    _check_ids(found, tokenizer, vocab_size, spec)
    if not found:
        raise ConfigError(f"{spec} holds no prompts; give a set with at least one.")
    kept = _short_enough(found, limit, max_prompt_tokens, tokenizer, spec)
    return [_with_output_tokens(each, tokenizer) for each in kept]


def _check_ids(found: list[Found], tokenizer: Any, vocab_size: int | None, spec: str) -> None:
    size = vocab_size or (None if tokenizer is None else len(tokenizer))
    if size is None:
        return
    for each in found:
        if each.prompt.token_ids and max(each.prompt.token_ids) >= size:
            raise ConfigError(
                f"{spec}: prompt {each.prompt.id} has token id {max(each.prompt.token_ids)} but "
                f"the vocabulary has {size}; give the ids of this model's tokenizer."
            )


def _short_enough(
    found: list[Found], limit: int | None, most: int | None, tokenizer: Any, spec: str
) -> list[Found]:
    """Measures only as many as it takes to fill the limit: tokenizing a whole set takes seconds."""
    num_long = 0

    def is_short(each: Found) -> bool:
        nonlocal num_long
        is_long = most is not None and prompt_tokens(each.prompt, tokenizer) > most
        num_long += is_long
        return not is_long

    kept = list(filter(is_short, found)) if limit is None else in_turns(found, limit, is_short)
    if not kept:
        raise ConfigError(
            f"{spec}: all {len(found)} prompts are longer than {most} tokens; raise "
            "max_prompt_tokens or choose another set."
        )
    if num_long:
        logger.warning(
            "%s: %d prompts longer than %d tokens were left out, %d taken",
            spec,
            num_long,
            most,
            len(kept),
        )
    return kept


def _with_output_tokens(found: Found, tokenizer: Any) -> Prompt:
    if tokenizer is None or found.answer is None or found.prompt.output_tokens is not None:
        return found.prompt
    length = max(1, num_tokens(found.answer, tokenizer))
    return dataclasses.replace(found.prompt, output_tokens=length)
