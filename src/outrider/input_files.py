"""Reads and validates files that users name: prompts, traces, training texts, settings."""

from __future__ import annotations

import gzip
import json
import os
import reprlib
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

MAX_LINE_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 2 * 2**30  # ShareGPT is one line of 700 MB
MAX_SETTINGS_BYTES = 2**20


_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxlist = _short.maxdict = _short.maxtuple = 10


def path_from(text: str) -> Path:
    """A path as a user writes it; `~` is expanded."""
    try:
        return Path(text.strip()).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text!r} starts in an unknown home folder; write it out.") from None


def numbered_lines(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, str]]:
    """The non-blank lines of a text file (`.gz`: compressed), numbered from 1.

    Only a line feed ends a line, as in JSON lines: other separators may occur inside a string.
    Lines longer than `max_bytes` are an error.
    """
    number = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(
                iter(lambda: lines.readline(max_bytes + 1), b""), start=1
            ):
                if len(line) > max_bytes:
                    raise ConfigError(
                        f"{path}:{number} is longer than {max_bytes} bytes; give a file with one "
                        "line per entry."
                    )
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError:
        raise ConfigError(f"{path}:{number} is not UTF-8 text; save the file as UTF-8.") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path} cannot be read ({reason}); give a readable file.") from None


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    _check_regular(path)
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _check_regular(path: Path) -> None:
    """Rejects pipes and devices: opening a pipe blocks, and a device may be endless."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(
        mode
    ):  # reading a folder fails with its own error
        raise ConfigError(f"{path} is not a regular file; save its content to one and name that.")


def whole_text(path: Path) -> str:
    """The text of a file that fits in memory."""
    text, size = [], 0
    for _, line in numbered_lines(path, MAX_TEXT_BYTES):
        size += len(line)
        if size > MAX_TEXT_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_TEXT_BYTES} bytes; give a part of it.")
        text.append(line)
    return "".join(text)


def settings_text(path: Path) -> str:
    """The text of a hand-written settings file."""
    _check_regular(path)
    with path.open("rb") as file:
        text = file.read(MAX_SETTINGS_BYTES + 1)
    if len(text) > MAX_SETTINGS_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_SETTINGS_BYTES} bytes; it must be shorter.")
    return text.decode("utf-8")


def read_json(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); give {expected}.") from None


def json_rows(path: Path, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a JSON-lines file with its location, as "questions.jsonl:3"."""
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        row = read_json(line, where, expected)
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is not a JSON object; give {expected}.")
        yield where, row


def text_of(value: Any, name: str, where: str) -> str:
    """`value` if it is non-blank text that can be encoded as UTF-8."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {name} must be text that is not blank, not {shown(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: {name} holds half a character (a lone surrogate); remove it."
        ) from None
    return value


def label_of(value: Any, name: str, where: str) -> str:
    """An id or a category: text, or a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_of(value, name, where)


def count_of(value: Any, name: str, where: str) -> int:
    """`value` if it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{where}: {name} must be a whole number of at least 1, not {shown(value)}."
        )
    return value


def shown(value: Any) -> str:
    """A value as shown in an error: on one line and short.

    YAML aliases can expand without bound, so nested values are abbreviated first.
    """
    text = repr(value) if isinstance(value, str | int | float | None) else _short.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
