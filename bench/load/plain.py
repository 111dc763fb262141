"""What others say, as it may be printed."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    """On one line, without what a terminal obeys and without halves of characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " for each in text)


def without_key(command: str) -> str:
    """The command of a server as it may be printed and kept."""
    return re.sub(r"(--api-key[ =])(?!\*)\S+", r"\1***", command)
