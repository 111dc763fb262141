"""The files of a checkpoint: which to download, and reading the small ones."""

from __future__ import annotations

import json
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.errors import ModelError

MAX_BYTES = 256 * 2**20  # the largest tokenizer.json of today has 33 MiB


class Files(StrEnum):
    """Which files of a model to download from a hub."""

    TEXT = "text"  # tokenizer, chat template and configuration
    ALL = "all"
    PICKLED = "pickled"  # weights written by torch.save, common for heads


def check_size(path: Path) -> None:
    """Reject large files, which are read whole; a missing file is reported later."""
    with suppress(OSError):
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelError(
                f"{path} has {size} bytes, and files of its kind at most {MAX_BYTES}; download "
                "it again."
            )


def read_json(path: Path) -> dict[str, Any]:
    check_size(path)
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; get the complete checkpoint again.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again.") from None
    if not isinstance(contents, dict):
        raise ModelError(f"{path} holds no JSON object; download it again.")
    return contents
