"""From the fields that files of prompts use to a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.bench.load.asks import ASSISTANT, USER, Message, Prompt
from outrider.bench.load.files import count_of, label_of, shown, text_of
from outrider.bench.load.prompts.found import Found
from outrider.errors import ConfigError

# Fields that hold what the user says, in the order they are looked for.
TURN_FIELDS = ("prompt", "question", "instruction", "input")
ID_FIELDS = ("id", "question_id", "task_id")
ROW = (
    "JSON lines with `messages`, `turns`, `prompt`, `question`, `instruction`, `input`, `text` or "
    "`token_ids`"
)


def found_in(row: Mapping[str, Any], where: str, *, own_id: str, category: str) -> Found:
    """The prompt of a row; `own_id` and `category` where it has none of its own.

    `messages`    [{role, content}]; the user's last messages are the turns, what is said before
                  them is history, and an answer after them gives the answer's length
    `turns`       texts, or [{content}]: what the user says, each after the answer to the last
    `prompt`, `question`, `instruction` (with `input` below it) or `input`: one turn
    `text`        continued as it is, without a chat template
    `token_ids`   likewise
    """
    label = next((row[name] for name in ID_FIELDS if row.get(name) is not None), own_id)
    output_tokens = row.get("output_tokens")
    if output_tokens is not None:
        output_tokens = count_of(output_tokens, "output_tokens", where)
    given, answer = _content(row, where)
    prompt = Prompt(
        id=label_of(label, "the id", where),
        category=label_of(row.get("category") or category, "category", where),
        output_tokens=output_tokens,
        **given,
    )
    return Found(prompt, answer)


def _content(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str | None]:
    """The fields of a prompt that say what is asked, and the answer given beside it."""
    if row.get("messages") is not None:
        history, turns, answer = split_messages(messages_of(row["messages"], where), where)
        return {"history": history, "turns": turns}, answer
    if row.get("turns") is not None:
        return {"turns": turns_of(row["turns"], where)}, None
    said = [name for name in TURN_FIELDS if row.get(name) not in (None, "")]
    if said[:2] == ["instruction", "input"]:
        return {"turns": ("\n\n".join(text_of(row[name], name, where) for name in said[:2]),)}, None
    if said:
        return {"turns": (text_of(row[said[0]], said[0], where),)}, None
    if row.get("text") is not None:
        return {"text": text_of(row["text"], "text", where)}, None
    if row.get("token_ids") is not None:
        return {"token_ids": token_ids_of(row["token_ids"], where)}, None
    raise ConfigError(f"{where} holds no prompt (its fields: {shown(sorted(row))}); give {ROW}.")


def turns_of(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: turns must be a list of texts, not {shown(value)}.")
    return tuple(
        text_of(each.get("content") if isinstance(each, dict) else each, "a turn", where)
        for each in value
    )


def messages_of(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(
            f"{where}: messages must be a list of {{role, content}}, not {shown(value)}."
        )
    return tuple(
        Message(
            text_of(each.get("role"), "a message's role", where),
            text_of(each.get("content"), "a message's content", where),
        )
        for each in value
    )


def split_messages(
    messages: tuple[Message, ...], where: str
) -> tuple[tuple[Message, ...], tuple[str, ...], str | None]:
    """History, the user's last messages, and the answer to them if one is given."""
    end = len(messages)
    while end and messages[end - 1].role != USER:
        end -= 1
    start = end
    while start and messages[start - 1].role == USER:
        start -= 1
    if start == end:
        raise ConfigError(f"{where}: messages hold nothing of role {USER!r}; add what is asked.")
    after = messages[end] if end < len(messages) else None
    answer = after.content if after is not None and after.role == ASSISTANT else None
    return messages[:start], tuple(said.content for said in messages[start:end]), answer


def token_ids_of(value: Any, where: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not value
        or not all(type(each) is int and 0 <= each < 2**31 for each in value)
    ):
        raise ConfigError(
            f"{where}: token_ids must be a list of whole numbers from 0, not {shown(value)}."
        )
    return tuple(value)
