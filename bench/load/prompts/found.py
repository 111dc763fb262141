"""What a reader of prompts gives and is given."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outrider.bench.load.asks import Prompt
from outrider.errors import ConfigError

# A word and the blank before it, in tokens of the usual vocabularies: what lengths are estimated
# with where there is no tokenizer.
WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a reader: the part of the spec after its name, and the options."""

    argument: str
    tokenizer: Any = None  # an `outrider.text.tokenizer.Tokenizer`
    limit: int | None = None
    seed: int = 0
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A prompt, and the answer that stands beside it where it comes from."""

    prompt: Prompt
    answer: str | None = None


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def num_tokens(text: str, tokenizer: Any) -> int:
    """Tokens of a text, estimated from its words where there is no tokenizer."""
    if tokenizer is None:
        return round(len(text.split()) / WORDS_PER_TOKEN)
    return len(encode(tokenizer, text))


def prompt_tokens(prompt: Prompt, tokenizer: Any) -> int:
    """Tokens of a prompt, its chat template where the tokenizer has one, and all of its turns.

    The answers that will stand between the turns are not known and not counted.
    """
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    if prompt.text is not None:
        return num_tokens(prompt.text, tokenizer)
    first = [*((said.role, said.content) for said in prompt.history), ("user", prompt.turns[0])]
    if getattr(tokenizer, "chat_template", None):
        opening = num_tokens(_rendered(first, tokenizer, prompt.id), tokenizer)
    else:
        opening = sum(num_tokens(content, tokenizer) for _, content in first)
    return opening + sum(num_tokens(turn, tokenizer) for turn in prompt.turns[1:])


def _rendered(said: Iterable[tuple[str, str]], tokenizer: Any, prompt_id: str) -> str:
    messages = [{"role": role, "content": content} for role, content in said]
    try:
        from outrider.text.rendering import render  # Jinja, which only conversations need

        return render(tokenizer.get_chat_template(), messages, True, tokenizer.special_tokens_map)
    except Exception as error:  # a template raises what it likes
        raise ConfigError(
            f"the tokenizer's chat template refuses prompt {prompt_id} ({error}); give messages "
            "that it takes."
        ) from None


def with_unique_ids(set_name: str, found: Iterable[Found]) -> list[Found]:
    """Ids preceded by the set's name; one met again is numbered, `#2` and so on."""
    repeats: Counter[str] = Counter()
    taken: set[str] = set()
    named = []
    for each in found:
        own = each.prompt.id
        while own in taken:
            repeats[each.prompt.id] += 1
            own = f"{each.prompt.id}#{repeats[each.prompt.id] + 1}"
        taken.add(own)
        prompt = dataclasses.replace(each.prompt, id=f"{set_name}/{own}")
        named.append(dataclasses.replace(each, prompt=prompt))
    return named


def in_turns(found: Iterable[Found], limit: int, is_wanted: Callable[[Found], bool]) -> list[Found]:
    """The first `limit` that are wanted, categories taking turns.

    Taking turns spreads whatever drifts over a run evenly over the categories.
    """
    by_category: dict[str, list[Found]] = defaultdict(list)
    for each in found:
        by_category[each.prompt.category].append(each)
    waiting = [filter(is_wanted, members) for members in by_category.values()]
    taken: list[Found] = []
    while waiting:
        for members in list(waiting):
            drawn = next(members, None)
            if drawn is None:
                waiting.remove(members)
                continue
            taken.append(drawn)
            if len(taken) == limit:
                return taken
    return taken
