"""Parses times and lists of numbers."""

from __future__ import annotations

import math
import re

from outrider.errors import ConfigError

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}
_TIME = re.compile(r"\s*([0-9.eE+-]+)\s*(us|ms|s|min|m|h|)\s*")


def seconds_of(text: str, what: str) -> float:
    """Seconds of "500ms", "30s", "5m" or "8h"; a bare number is seconds."""
    found = _TIME.fullmatch(text)
    try:
        seconds = float(found[1]) * UNITS_S[found[2]] if found else math.nan
    except ValueError:
        seconds = math.nan
    if not (0 <= seconds < math.inf):
        raise ConfigError(f"{what} is {text!r}; write a time such as 500ms, 30s, 5m or 8h.")
    return seconds


def numbers_of(text: str, what: str) -> list[float]:
    """Comma-separated numbers without duplicates."""
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise ConfigError(f"{what} is {text!r}; write comma-separated numbers, as 1,2,4.")
    return list(dict.fromkeys(numbers))
