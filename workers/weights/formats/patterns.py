"""Layers by name: exactly, or by regular expressions.

A checkpoint chooses them freely, so those that could keep the loader busy for long are refused.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable

from outrider.errors import ModelError

REGULAR = "re:"
MAX_PATTERNS = 256
_MAX_WORK = 1 << 26  # ways to match a name, at most
_NAME_LEN = 40
_ESCAPES = re.compile(r"\\.|\[\^?\]?[^\]]*\]|\?:")
_REPEATS = re.compile(r"[*+?{]")
_NESTED = re.compile(r"\)[*+?{]|\(\?")  # repeated groups, and those that look around


def compiled(texts: Iterable[str], name: str) -> tuple[re.Pattern[str], ...]:
    """Those of `texts` that are regular expressions; `name` is where they stand."""
    found = [text.removeprefix(REGULAR) for text in texts if text.startswith(REGULAR)]
    if len(found) > MAX_PATTERNS:
        raise ModelError(
            f"{name} holds {len(found)} regular expressions, and may hold {MAX_PATTERNS}; name the "
            "layers instead."
        )
    return tuple(_compile(text, name) for text in found)


def _compile(text: str, name: str) -> re.Pattern[str]:
    bare = _ESCAPES.sub("x", text)
    num_groups = max(bare.count("("), 1)
    choices = (bare.count("|") / num_groups + 1) ** num_groups
    if _NESTED.search(bare) or choices * _NAME_LEN ** len(_REPEATS.findall(bare)) > _MAX_WORK:
        raise ModelError(
            f"{name} holds the regular expression {reprlib.repr(text)}, which could take very "
            "long: it repeats a group or too often; name the layers instead."
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"{name} holds a regular expression that is none ({error}); get the complete "
            "checkpoint again."
        ) from None
