"""Converts a row of a dataset file into a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import ConfigError
from outrider.input_files import count_of, label_of, shown, text_of
from outrider.loadtest.prompts.entries import DatasetEntry
from outrider.loadtest.requests import ASSISTANT, USER, Message, Prompt

# Fields of a user message, in order of precedence.
TURN_FIELDS = ("prompt", "question", "instruction", "input")
ID_FIELDS = ("id", "question_id", "task_id")
ROW = (
    "JSON lines with `messages`, `turns`, `prompt`, `question`, `instruction`, `input`, `text` or "
    "`token_ids`"
)


def entry_of(row: Mapping[str, Any], where: str, *, own_id: str, category: str) -> DatasetEntry:
    """The prompt of a row; `own_id` and `category` are defaults.

    `messages`    [{role, content}]; the user's last messages are the turns, messages before them
                  the history, and a reply after them gives the output length
    `turns`       texts, or [{content}]: user messages, each sent after the reply to the last
    `prompt`, `question`, `instruction` (with `input` below it) or `input`: one turn
    `text`        completed without a chat template
    `token_ids`   likewise
    """
    label = next((row[name] for name in ID_FIELDS if row.get(name) is not None), own_id)
    output_tokens = row.get("output_tokens")
    if output_tokens is not None:
        output_tokens = count_of(output_tokens, "output_tokens", where)
    content, answer = _content(row, where)
    prompt = Prompt(
        id=label_of(label, "the id", where),
        category=label_of(row.get("category") or category, "category", where),
        output_tokens=output_tokens,
        **content,
    )
    return DatasetEntry(prompt, answer)


def _content(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str | None]:
    """The content fields of a prompt, and the reference reply."""
    if row.get("messages") is not None:
        history, turns, answer = split_messages(messages_of(row["messages"], where), where)
        return {"history": history, "turns": turns}, answer
    if row.get("turns") is not None:
        return {"turns": turns_of(row["turns"], where)}, None
    names = [name for name in TURN_FIELDS if row.get(name) not in (None, "")]
    if names[:2] == ["instruction", "input"]:
        return {
            "turns": ("\n\n".join(text_of(row[name], name, where) for name in names[:2]),)
        }, None
    if names:
        return {"turns": (text_of(row[names[0]], names[0], where),)}, None
    if row.get("text") is not None:
        return {"text": text_of(row["text"], "text", where)}, None
    if row.get("token_ids") is not None:
        return {"token_ids": token_ids_of(row["token_ids"], where)}, None
    raise ConfigError(f"{where} has no prompt (its fields: {shown(sorted(row))}); give {ROW}.")


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
    """History, the user's last messages, and the reply to them, if any."""
    end = len(messages)
    while end and messages[end - 1].role != USER:
        end -= 1
    start = end
    while start and messages[start - 1].role == USER:
        start -= 1
    if start == end:
        raise ConfigError(f"{where}: messages have none of role {USER!r}; add one.")
    after = messages[end] if end < len(messages) else None
    answer = after.content if after is not None and after.role == ASSISTANT else None
    return messages[:start], tuple(each.content for each in messages[start:end]), answer


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
