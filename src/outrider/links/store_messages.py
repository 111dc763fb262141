"""What ranks ask the engine's board: each question has one answer, which never waits.

Ranks that make a process group write there where they can be reached, and read it of the others.
The link is one of its own, so a rank may ask from any thread and in the middle of anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.links.tags import message


@message("Write")
@dataclass(frozen=True, slots=True)
class Write:
    """Rank to engine: keep this. Answered by `Written`."""

    key: str
    value: bytes


@message("Written")
@dataclass(frozen=True, slots=True)
class Written:
    """Engine to rank."""


@message("Read")
@dataclass(frozen=True, slots=True)
class Read:
    """Rank to engine: answered by `Values`, None for a key nobody has written."""

    keys: tuple[str, ...]


@message("Values")
@dataclass(frozen=True, slots=True)
class Values:
    """Engine to rank."""

    values: tuple[bytes | None, ...]


@message("Add")
@dataclass(frozen=True, slots=True)
class Add:
    """Rank to engine: add to a number, written in decimal; absent is 0. Answered by `Count`."""

    key: str
    amount: int


@message("Erase")
@dataclass(frozen=True, slots=True)
class Erase:
    """Rank to engine: answered by `Count`, of the keys that were there."""

    key: str


@message("Count")
@dataclass(frozen=True, slots=True)
class Count:
    """Engine to rank."""

    count: int
