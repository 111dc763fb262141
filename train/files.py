"""Atomic writes: a file is complete or absent, whenever the process ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import ConfigError


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write to a file beside `path`, fsync it, and rename it onto `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def write_json(path: Path, contents: Any) -> None:
    text = json.dumps(contents, indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file that this package wrote."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as {what} ({error}); make it again.") from None
    if not isinstance(contents, dict):
        raise ConfigError(f"{path} is not {what}; make it again.")
    return contents
