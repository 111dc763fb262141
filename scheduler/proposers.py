"""What the scheduler has to know of whoever drafts; workers/proposers/ has the drafting itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from outrider.errors import ConfigError

KvRule: TypeAlias = Callable[[int, int], int]
"""From (drafted, accepted): of the KV slots a proposer wrote behind the committed text in a round,
how many hold committed tokens once its verdict is known."""

MOST_BEHIND = 2
"""A row drafts only if its proposer lacks KV of at most so many committed tokens: after full
acceptance it lacks its own last guess and the target's token. A row further behind decodes plainly
and catches up first."""


class Place(StrEnum):
    """Where a proposer runs."""

    DEVICE = "device"  # it writes the device's drafts, and may work ahead of the verdicts
    HOST = "host"  # it needs the host's texts: a row waits for its last verdict before it drafts


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """One way to draft.

    `kv_rule` is None for a proposer without KV of its own in the draft pool. One that `looks_ahead`
    has KV in the target's blocks, where what belongs to a token depends on the next one as well: of
    a cached prefix it can use all blocks but the last. It is written only for requests that may
    draft with it when they are given their row; no other ever does before it is given another.
    """

    name: str
    place: Place
    kv_rule: KvRule | None = None
    looks_ahead: bool = False
    max_depth: int | None = None  # the most it can draft, where its checkpoint has a limit
    mark: str = "drafted"  # what a reader is told of a token it drafted
    may_offer_less: bool = False  # than it is asked for, or nothing: it drafts what it finds

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"a proposer is named {self.name!r}; use letters, digits and _.")

    @property
    def keeps_kv(self) -> bool:
        return self.kv_rule is not None


def own_guesses_kept(drafted: int, accepted: int) -> int:
    """The rule of a model that feeds itself what it guesses, all but its last guess: what the
    target accepted of these stays."""
    if accepted < drafted:
        return accepted
    return drafted - 1 if drafted else 0
