"""The functions docs/tour.md names, and where they are. As a program it writes their lines anew.

A stop is a link whose text is `file.py:function` and whose target ends in `#L<line>`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tour.md"
_STOP = re.compile(r"\[`([\w/.]+\.py):([\w.]+)`\]\(([^)#]+)#L(\d+)\)")


class Stop(NamedTuple):
    file: str
    symbol: str
    target: str  # of the link
    line: int


class Span(NamedTuple):
    """Lines of a function or class, decorators left out."""

    first: int
    last: int


def stops(text: str) -> list[Stop]:
    return [Stop(file, symbol, to, int(line)) for file, symbol, to, line in _STOP.findall(text)]


def span_of(source: str, symbol: str) -> Span | None:
    """Where `function`, `Class` or `Class.method` is defined, or None."""
    body: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for name in symbol.split("."):
        found = next((each for each in _definitions(body) if each.name == name), None)
        if found is None:
            return None
        body = found.body
    return None if found is None else Span(found.lineno, found.end_lineno or found.lineno)


def with_lines(text: str) -> str:
    """The page with every line that of its function's definition."""

    def renewed(match: re.Match[str]) -> str:
        span = span_of((ROOT / match[1]).read_text(encoding="utf-8"), match[2])
        line = match[4] if span is None else span.first
        return f"[`{match[1]}:{match[2]}`]({match[3]}#L{line})"

    return _STOP.sub(renewed, text)


def _definitions(
    body: list[ast.stmt],
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
