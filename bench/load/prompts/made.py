"""Sets made to a length: random tokens, sonnets, and prompts with a shared beginning."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from outrider.bench.load.asks import Prompt
from outrider.bench.load.files import numbered_lines
from outrider.bench.load.prompts.found import Found, Wanted, num_tokens
from outrider.bench.load.prompts.pool import SONNETS, Part, cut_prompt
from outrider.errors import ConfigError

MAX_LENGTH = 1_000_000  # tokens of a prompt
MAX_COUNT = 1_000_000  # prompts of a set
DEFAULT_COUNT = 256  # where neither the spec nor a limit says how many
SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"
MIN_SONNET = 32  # tokens: the task and a line or two


def read_random(wanted: Wanted) -> Iterator[Found]:
    """`random:LEN`, `random:MIN-MAX`, either with `:COUNT`: token ids drawn evenly.

    Ids that the tokenizer calls special are not drawn. Where only the vocabulary's size is known,
    the first and the last eighth are left out: special ids stand at either end.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", wanted.argument)
    if match is None:
        raise ConfigError(
            f"random:{wanted.argument} is not understood; write random:LEN, random:MIN-MAX or "
            "either with :COUNT, as random:64-512:1000."
        )
    shortest = _within("random's length", match[1], MAX_LENGTH)
    longest = _within("random's length", match[2], MAX_LENGTH) if match[2] else shortest
    if longest < shortest:
        raise ConfigError(
            f"random:{wanted.argument} ends below its start; write the smaller first."
        )
    ids = _drawable_ids(wanted)
    rng = random.Random(f"random tokens {wanted.seed}")
    for number in range(_num_made("random", match[3], wanted)):
        drawn = tuple(rng.choices(ids, k=rng.randint(shortest, longest)))
        yield Found(Prompt(id=str(number), category="random", token_ids=drawn, is_natural=False))


def _drawable_ids(wanted: Wanted) -> list[int] | range:
    if wanted.tokenizer is not None:
        special = set(wanted.tokenizer.all_special_ids)
        size = wanted.vocab_size or len(wanted.tokenizer)
        return [each for each in range(min(size, len(wanted.tokenizer))) if each not in special]
    if wanted.vocab_size is None:
        raise ConfigError(
            "random prompts need the vocabulary they are drawn from; give a tokenizer or the "
            "vocabulary's size."
        )
    ids = range(wanted.vocab_size // 8, wanted.vocab_size * 7 // 8)
    if not ids:
        raise ConfigError(f"a vocabulary of {wanted.vocab_size} tokens is too small to draw from.")
    return ids


def read_sonnet(wanted: Wanted) -> Iterator[Found]:
    """`sonnet:LEN` with an optional `:COUNT`: as many drawn lines as come near LEN tokens."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", wanted.argument)
    if match is None:
        raise ConfigError(
            f"sonnet:{wanted.argument} is not understood; write sonnet:LEN or sonnet:LEN:COUNT, as "
            "sonnet:512."
        )
    length = _within("sonnet's length", match[1], MAX_LENGTH, least=MIN_SONNET)
    lines = [line for _, line in numbered_lines(SONNETS)]
    sizes = [num_tokens(line, wanted.tokenizer) for line in lines]
    task = num_tokens(SONNET_TASK, wanted.tokenizer)
    rng = random.Random(f"sonnet {wanted.seed}")
    for number in range(_num_made("sonnet", match[2], wanted)):
        drawn, room = "", length - task
        while True:
            at = rng.randrange(len(lines))
            if sizes[at] > room and drawn:
                break
            drawn, room = drawn + lines[at], room - sizes[at]
        yield Found(
            Prompt(id=str(number), category="sonnet", turns=(SONNET_TASK + drawn.rstrip(),))
        )


def read_shared_prefix(wanted: Wanted) -> Iterator[Found]:
    """`shared-prefix:PREFIX+OWN` with an optional `:GROUPS`, lengths in tokens.

    Prompts of a group begin with the same PREFIX tokens and go on with OWN tokens of their own;
    groups (1 unless given) take turns.
    """
    match = re.fullmatch(r"(\d+)\+(\d+)(?::(\d+))?", wanted.argument)
    if match is None:
        raise ConfigError(
            f"shared-prefix:{wanted.argument} is not understood; write shared-prefix:PREFIX+OWN or "
            "shared-prefix:PREFIX+OWN:GROUPS, as shared-prefix:1024+64:8."
        )
    prefix = _within("the shared prefix", match[1], MAX_LENGTH)
    own = _within("the part after the prefix", match[2], MAX_LENGTH)
    groups = _within("the number of groups", match[3] or "1", MAX_COUNT)
    for number in range(wanted.limit or max(DEFAULT_COUNT, groups)):
        group = number % groups
        parts = [Part("prefix", group, prefix), Part("own", number, own)]
        yield Found(
            cut_prompt(
                str(number),
                f"prefix {group}",
                parts,
                tokenizer=wanted.tokenizer,
                seed=wanted.seed,
            )
        )


def _num_made(name: str, given: str | None, wanted: Wanted) -> int:
    if given is None:
        return wanted.limit or DEFAULT_COUNT
    return min(_within(f"{name}'s count", given, MAX_COUNT), wanted.limit or MAX_COUNT)


def _within(what: str, digits: str, most: int, least: int = 1) -> int:
    # Digits are counted first: Python refuses to read thousands of them.
    value = int(digits) if len(digits) <= 12 else most + 1
    if not least <= value <= most:
        raise ConfigError(f"{what} is {digits[:15]}; give {least} to {most}.")
    return value
