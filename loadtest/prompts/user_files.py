"""Datasets in users' files: ShareGPT, SPEED-Bench and plain JSON lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.input_files import (
    json_rows,
    label_of,
    path_from,
    read_json,
    shown,
    text_of,
    whole_text,
)
from outrider.loadtest.prompts.entries import DatasetEntry, DatasetOptions
from outrider.loadtest.prompts.rows import ROW, entry_of
from outrider.loadtest.requests import Message, Prompt

logger = logging.getLogger(__name__)

SHAREGPT = "a JSON list of {id, conversations: [{from: human or gpt, value}]}"
HUMAN, MODEL, SYSTEM = ("human", "user"), ("gpt", "chatgpt", "assistant", "model"), ("system",)
SPEED_BENCH = "JSON lines of {question_id, category, messages or turns}"
# NVIDIA publishes this placeholder for texts it may not redistribute.
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def path_of(options: DatasetOptions, name: str) -> Path:
    if not options.argument:
        raise ConfigError(f"{name} needs a file; write {name}:PATH.")
    return path_from(options.argument)


def read_jsonl(options: DatasetOptions) -> Iterator[DatasetEntry]:
    """Any JSON lines; `rows.entry_of` lists the supported fields."""
    path = path_of(options, "jsonl")
    for number, (where, row) in enumerate(json_rows(path, ROW), start=1):
        yield entry_of(row, where, own_id=str(number), category="jsonl")


def read_speed_bench(options: DatasetOptions) -> Iterator[DatasetEntry]:
    """SPEED-Bench as written by its `prepare.py`: a `.jsonl` file, or a folder of them.

    Each row has `question_id`, `category` (a domain of the qualitative split, or `low_entropy`,
    `mixed`, `high_entropy`) and `messages` [{role: user, content}], or `turns` [text] as in the
    published set; several of either are the turns of one conversation. Other fields are ignored.
    """
    path = path_of(options, "speed-bench")
    files = (
        sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if os.path.isdir(path) else [path]
    )
    if not files:
        raise ConfigError(f"{path} holds no .jsonl file; give {SPEED_BENCH}.")
    if path.suffix == ".parquet":
        raise ConfigError(
            f"{path} is a parquet file; give {SPEED_BENCH}, as SPEED-Bench's prepare.py writes."
        )
    for file in files:
        for number, (where, row) in enumerate(json_rows(file, SPEED_BENCH), start=1):
            if row.get("messages") is None and row.get("turns") is None:
                raise ConfigError(f"{where} has neither messages nor turns; give {SPEED_BENCH}.")
            entry = entry_of(row, where, own_id=f"{file.stem}-{number}", category="speed-bench")
            if any(SPEED_BENCH_PLACEHOLDER in turn for turn in entry.prompt.turns):
                raise ConfigError(
                    f"{where} has a placeholder for its text; run SPEED-Bench's prepare.py, which "
                    "fetches the texts, and give the file it writes."
                )
            yield entry


def read_sharegpt(options: DatasetOptions) -> Iterator[DatasetEntry]:
    """ShareGPT's JSON: keeps the user's messages; of the replies, only their length matters."""
    path = path_of(options, "sharegpt")
    entries = read_json(whole_text(path), str(path), SHAREGPT)
    if not isinstance(entries, list):
        raise ConfigError(f"{path} is not a JSON list; give {SHAREGPT}.")
    num_empty = 0
    for number, entry in enumerate(entries, start=1):
        where = f"{path}, entry {number}"
        converted = _conversation(entry, where, own_id=str(number))
        if converted is None:
            num_empty += 1
        else:
            yield converted
    if num_empty:
        logger.warning(
            "%s: skipped %d of %d conversations without a user message",
            path,
            num_empty,
            len(entries),
        )


def _conversation(entry: Any, where: str, own_id: str) -> DatasetEntry | None:
    """None without a user message."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {shown(entry)}; give {SHAREGPT}.")
    conversation = entry.get("conversations", entry.get("conversation"))
    if not isinstance(conversation, list):
        raise ConfigError(f"{where}: conversations is {shown(conversation)}; give {SHAREGPT}.")
    history: list[Message] = []
    turns: list[str] = []
    answer: str | None = None
    for message in conversation:
        speaker, value = _message(message, where)
        if not value.strip():
            continue
        if speaker in HUMAN:
            turns.append(text_of(value, "a value", where))
        elif speaker in SYSTEM and not turns:
            history.append(Message("system", text_of(value, "a value", where)))
        elif speaker in MODEL and len(turns) == 1 and answer is None:
            answer = text_of(value, "a value", where)
    if not turns:
        return None
    label = label_of(entry.get("id") or own_id, "the id", where)
    prompt = Prompt(id=label, category="sharegpt", history=tuple(history), turns=tuple(turns))
    return DatasetEntry(prompt, answer)


def _message(message: Any, where: str) -> tuple[str, str]:
    speaker = message.get("from") if isinstance(message, dict) else None
    value = message.get("value") if isinstance(message, dict) else None
    if not isinstance(speaker, str) or not isinstance(value, str):
        raise ConfigError(f"{where}: {shown(message)} is not {{from, value}}; give {SHAREGPT}.")
    return speaker, value
