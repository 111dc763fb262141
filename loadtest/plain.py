"""Makes text of servers and users safe to print."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    """On one line, without control characters and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " for each in text)


def without_key(command: str) -> str:
    """A server's command with its API key masked."""
    return re.sub(r"(--api-key[ =])(?!\*)\S+", r"\1***", command)
