"""Prompts and documents to train on; refuses evaluation sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.input_files import json_rows, path_from, text_of, whole_text

# Acceptance is reported on these: a student trained on them would be tested on its memory.
EVALUATION_SETS = ("humaneval", "mbpp", "arenahard", "oasst", "specbench")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text", ".gz")
HELD_OUT_EVERY = 20
PIECE_CHARS = 16_384  # of a document: more than the longest context, in any language
_EXPECTED = 'JSON lines of {"prompt": TEXT}, {"turns": [TEXT]} or {"messages": [...]}'


@dataclass(slots=True)
class SourceTexts:
    """Texts, every twentieth of which is held out."""

    items: list[tuple[str, str]] = field(default_factory=list)  # (kind, text)

    def part(self, held_out: bool) -> Sequence[tuple[str, str]]:
        picked = [
            item
            for number, item in enumerate(self.items)
            if (number % HELD_OUT_EVERY == 0) == held_out
        ]
        return picked or ([] if held_out else self.items)


def refuse_evaluation_sets(path: Path) -> None:
    """Raise if any part of a path, or of what it links to, names an evaluation set."""
    for part in (*path.parts, *path.resolve().parts):
        plain = re.sub(r"[^a-z0-9]", "", part.lower())
        for name in EVALUATION_SETS:
            if name in plain:
                raise ConfigError(
                    f"{path} is of {part!r}, which is kept for evaluation; train on other prompts."
                )


def read_prompts(paths: Sequence[str]) -> SourceTexts:
    """Users' first turns; their kind is the row's category, else the file's name."""
    pool = SourceTexts()
    for given in paths:
        path = path_from(given)
        refuse_evaluation_sets(path)
        name = path.name.partition(".")[0]
        for where, row in json_rows(path, _EXPECTED):
            category = row.get("category")
            kind = category if isinstance(category, str) and category else name
            pool.items.append((kind, _first_turn(row, where)))
    return pool


def _first_turn(row: dict[str, Any], where: str) -> str:
    if "prompt" in row:
        return text_of(row["prompt"], "prompt", where)
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        return text_of(turns[0], "turns[0]", where)
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return text_of(message.get("content"), "content", where)
    raise ConfigError(f"{where} has none of prompt, turns and messages; give {_EXPECTED}.")


def read_documents(folder: str | None) -> SourceTexts:
    """The texts below a folder, cut into pieces."""
    pool = SourceTexts()
    if folder is None:
        return pool
    root = path_from(folder)
    refuse_evaluation_sets(root)
    if not root.is_dir():
        raise ConfigError(f"--documents is {folder!r}, which is not a folder; name one with texts.")
    for path in _texts(root):
        refuse_evaluation_sets(path)
        text = whole_text(path)
        for at in range(0, len(text), PIECE_CHARS):
            piece = text[at : at + PIECE_CHARS].strip()
            if piece:
                pool.items.append(("document", piece))
    if not pool.items:
        endings = ", ".join(TEXT_SUFFIXES)
        raise ConfigError(f"--documents is {folder!r}, which has no text ({endings}); add some.")
    return pool


def _texts(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in TEXT_SUFFIXES:
            yield path
