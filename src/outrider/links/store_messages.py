"""Requests of ranks to the engine's rendezvous store; each is answered at once.

Ranks that make a process group write their addresses there and read the others'. The store has its
own link, so a rank may use it from any thread at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.links.tags import message


@message("Write")
@dataclass(frozen=True, slots=True)
class Write:
    """Rank to engine: set a key. Answered by `WriteDone`."""

    key: str
    value: bytes


@message("Written")
@dataclass(frozen=True, slots=True)
class WriteDone:
    """Engine to rank."""


@message("Read")
@dataclass(frozen=True, slots=True)
class Read:
    """Rank to engine: answered by `Values`, None for an absent key."""

    keys: tuple[str, ...]


@message("Values")
@dataclass(frozen=True, slots=True)
class Values:
    """Engine to rank."""

    values: tuple[bytes | None, ...]


@message("Add")
@dataclass(frozen=True, slots=True)
class Add:
    """Rank to engine: add to a decimal number; absent is 0. Answered by `StoreCount`."""

    key: str
    amount: int


@message("Erase")
@dataclass(frozen=True, slots=True)
class Erase:
    """Rank to engine: answered by `StoreCount`, the number of keys erased."""

    key: str


@message("Count")
@dataclass(frozen=True, slots=True)
class StoreCount:
    """Engine to rank."""

    count: int
