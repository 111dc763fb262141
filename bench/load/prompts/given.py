"""Sets in a file that the user gives: ShareGPT, SPEED-Bench and plain JSON lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.bench.load.asks import Message, Prompt
from outrider.bench.load.files import (
    json_rows,
    label_of,
    path_from,
    read_json,
    shown,
    text_of,
    whole_text,
)
from outrider.bench.load.prompts.found import Found, Wanted
from outrider.bench.load.prompts.rows import ROW, found_in
from outrider.errors import ConfigError

logger = logging.getLogger(__name__)

SHAREGPT = "a JSON list of {id, conversations: [{from: human or gpt, value}]}"
HUMAN, MODEL, SYSTEM = ("human", "user"), ("gpt", "chatgpt", "assistant", "model"), ("system",)
SPEED_BENCH = "JSON lines of {question_id, category, messages or turns}"
# What NVIDIA publishes instead of a text that is not its own to give.
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def path_of(wanted: Wanted, name: str) -> Path:
    if not wanted.argument:
        raise ConfigError(f"{name} needs a file; write {name}:PATH.")
    return path_from(wanted.argument)


def read_jsonl(wanted: Wanted) -> Iterator[Found]:
    """Any JSON lines; `rows.found_in` says which fields are understood."""
    path = path_of(wanted, "jsonl")
    for number, (where, row) in enumerate(json_rows(path, ROW), start=1):
        yield found_in(row, where, own_id=str(number), category="jsonl")


def read_speed_bench(wanted: Wanted) -> Iterator[Found]:
    """SPEED-Bench as its `prepare.py` leaves it: a `.jsonl` file, or a folder of them.

    Each row has `question_id`, `category` (a domain of the qualitative split, or `low_entropy`,
    `mixed`, `high_entropy`) and `messages` [{role: user, content}], or `turns` [text] as in the
    published set; several of either are the turns of one conversation. The other fields are left.
    """
    path = path_of(wanted, "speed-bench")
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
            found = found_in(row, where, own_id=f"{file.stem}-{number}", category="speed-bench")
            if any(SPEED_BENCH_PLACEHOLDER in turn for turn in found.prompt.turns):
                raise ConfigError(
                    f"{where} has a placeholder for its text; run SPEED-Bench's prepare.py, which "
                    "fetches the texts, and give the file it writes."
                )
            yield found


def read_sharegpt(wanted: Wanted) -> Iterator[Found]:
    """ShareGPT's JSON; what the user says is kept, the answers tell only their length."""
    path = path_of(wanted, "sharegpt")
    entries = read_json(whole_text(path), str(path), SHAREGPT)
    if not isinstance(entries, list):
        raise ConfigError(f"{path} is no JSON list; give {SHAREGPT}.")
    num_empty = 0
    for number, entry in enumerate(entries, start=1):
        where = f"{path}, entry {number}"
        found = _conversation(entry, where, own_id=str(number))
        if found is None:
            num_empty += 1
        else:
            yield found
    if num_empty:
        logger.warning(
            "%s: %d of %d conversations in which the user says nothing were left out",
            path,
            num_empty,
            len(entries),
        )


def _conversation(entry: Any, where: str, own_id: str) -> Found | None:
    """None if the user says nothing in it."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {shown(entry)}; give {SHAREGPT}.")
    conversation = entry.get("conversations", entry.get("conversation"))
    if not isinstance(conversation, list):
        raise ConfigError(f"{where}: conversations is {shown(conversation)}; give {SHAREGPT}.")
    history: list[Message] = []
    turns: list[str] = []
    answer: str | None = None
    for said in conversation:
        speaker, value = _said(said, where)
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
    return Found(prompt, answer)


def _said(said: Any, where: str) -> tuple[str, str]:
    speaker = said.get("from") if isinstance(said, dict) else None
    value = said.get("value") if isinstance(said, dict) else None
    if not isinstance(speaker, str) or not isinstance(value, str):
        raise ConfigError(f"{where}: {shown(said)} is no {{from, value}}; give {SHAREGPT}.")
    return speaker, value
