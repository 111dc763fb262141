"""The files of a checkpoint: which are wanted, and the small ones."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.errors import ModelError


class Files(StrEnum):
    """Which files of a model somebody needs; what is on this host already is not asked for."""

    TEXT = "text"  # tokenizer, chat template and configuration
    ALL = "all"
    PICKLED = "pickled"  # weights as torch.save writes them, in which many heads come


def read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; get the complete checkpoint again.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again.") from None
    if not isinstance(contents, dict):
        raise ModelError(f"{path} holds no JSON object; download it again.")
    return contents
