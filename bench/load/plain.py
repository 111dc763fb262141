"""What others say, as it may be printed."""

from __future__ import annotations


def plain(text: str) -> str:
    """On one line, without what a terminal obeys and without halves of characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " for each in text)
