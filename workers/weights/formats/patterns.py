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
_MAX_WORK = 1 << 25  # ways to match a name, of all patterns together
_NAME_LEN = 40
_ESCAPES = re.compile(r"\\.|\[\^?\]?[^\]]*\]")
_REPEATS = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def compiled(texts: Iterable[str], name: str) -> tuple[re.Pattern[str], ...]:
    """Those of `texts` that are regular expressions; `name` is where they stand."""
    found = [text.removeprefix(REGULAR) for text in texts if text.startswith(REGULAR)]
    if len(found) > MAX_PATTERNS:
        raise ModelError(
            f"{name} holds {len(found)} regular expressions, and may hold {MAX_PATTERNS}; name the "
            "layers instead."
        )
    patterns, work = [], 0.0
    for text in found:
        work += _work(text)
        if work > _MAX_WORK:
            raise ModelError(
                f"{name} holds the regular expression {reprlib.repr(text)}, which could take very "
                "long, alone or with those before it; name the layers instead."
            )
        patterns.append(_compile(text, name))
    return tuple(patterns)


def _work(text: str) -> float:
    """A bound on the ways to match a name."""
    bare = _ESCAPES.sub("x", text).replace("(?", "(")
    if _REPEATED_GROUP.search(bare):
        return float("inf")
    choices, open_groups = 2.0 ** min(bare.count("?"), 64), [1]
    for character in bare:
        if character == "(":
            open_groups.append(1)
        elif character == "|":
            open_groups[-1] += 1
        elif character == ")" and len(open_groups) > 1:
            choices *= open_groups.pop()
    return choices * open_groups[0] * float(_NAME_LEN) ** min(len(_REPEATS.findall(bare)), 64)


def _compile(text: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"{name} holds a regular expression that is none ({error}); get the complete "
            "checkpoint again."
        ) from None
