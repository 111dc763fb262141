"""Dataset entries, and the options of dataset readers."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.loadtest.requests import Prompt

# Words per token of common vocabularies, to estimate lengths without a tokenizer.
WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Options of a dataset reader; `argument` is the spec after the name."""

    argument: str
    tokenizer: Any = None  # an `outrider.text.tokenizer.Tokenizer`
    limit: int | None = None
    seed: int = 0
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """A prompt and the dataset's reference reply, if any."""

    prompt: Prompt
    answer: str | None = None


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def num_tokens(text: str, tokenizer: Any) -> int:
    """Tokens of a text, estimated from its words without a tokenizer."""
    if tokenizer is None:
        return round(len(text.split()) / WORDS_PER_TOKEN)
    return len(encode(tokenizer, text))


def prompt_tokens(prompt: Prompt, tokenizer: Any) -> int:
    """Tokens of all turns of a prompt, rendered with the tokenizer's chat template if it has one.

    Replies between the turns are unknown and not counted.
    """
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    if prompt.text is not None:
        return num_tokens(prompt.text, tokenizer)
    first = [*((each.role, each.content) for each in prompt.history), ("user", prompt.turns[0])]
    if getattr(tokenizer, "chat_template", None):
        opening = num_tokens(_rendered(first, tokenizer, prompt.id), tokenizer)
    else:
        opening = sum(num_tokens(content, tokenizer) for _, content in first)
    return opening + sum(num_tokens(turn, tokenizer) for turn in prompt.turns[1:])


def _rendered(turns: Iterable[tuple[str, str]], tokenizer: Any, prompt_id: str) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        from outrider.text.rendering import render  # imports Jinja, needed by conversations only

        return render(tokenizer.get_chat_template(), messages, True, tokenizer.special_tokens_map)
    except Exception as error:  # templates may raise anything
        raise ConfigError(
            f"the tokenizer's chat template refuses prompt {prompt_id} ({error}); give messages "
            "that it takes."
        ) from None


def with_unique_ids(set_name: str, entries: Iterable[DatasetEntry]) -> list[DatasetEntry]:
    """Prefixes ids with the dataset's name and numbers duplicates, from `#2`."""
    repeats: Counter[str] = Counter()
    taken: set[str] = set()
    named = []
    for each in entries:
        own = each.prompt.id
        while own in taken:
            repeats[each.prompt.id] += 1
            own = f"{each.prompt.id}#{repeats[each.prompt.id] + 1}"
        taken.add(own)
        prompt = dataclasses.replace(each.prompt, id=f"{set_name}/{own}")
        named.append(dataclasses.replace(each, prompt=prompt))
    return named


def round_robin(
    entries: Iterable[DatasetEntry], limit: int, is_eligible: Callable[[DatasetEntry], bool]
) -> list[DatasetEntry]:
    """The first `limit` eligible entries, round-robin over categories.

    So drift during a run affects all categories equally.
    """
    by_category: dict[str, list[DatasetEntry]] = defaultdict(list)
    for each in entries:
        by_category[each.prompt.category].append(each)
    waiting = [filter(is_eligible, members) for members in by_category.values()]
    taken: list[DatasetEntry] = []
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
