"""What the scheduler knows of proposers; workers/proposers/ has the drafting itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from outrider.errors import ConfigError

KvRule: TypeAlias = Callable[[int, int, int, int, int], int]
"""From (computed, fed, drafted, accepted, base_len): how many positions of a proposer's KV are
valid once a round's verdict is known. Before the round `computed` were; in it the proposer computed
`fed` known tokens, up to the committed length `base_len`, and drafted. It also runs in a kernel:
write it with arithmetic, min and max only."""


class Place(StrEnum):
    """Where a proposer runs."""

    DEVICE = "device"  # it writes the device's drafts, and may work ahead of the verdicts
    HOST = (
        "host"  # it needs the committed text on the host: a row drafts only after its last verdict
    )


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """One way to draft.

    `kv_rule` is None for a proposer without KV in the draft pool. A row drafts only if its proposer
    lacks KV of at most `max_behind` committed tokens, and no round may leave it lacking more; a row
    further behind decodes plainly and catches up first. An autoregressive draft lacks at most two
    after a round: its own last draft token and the bonus token.

    A proposer with `needs_next_token` has KV in the target's blocks, where a token's entry also
    depends on the next token: of a cached prefix it can use all blocks but the last. It is written
    only for requests that may draft with it when they get their row; whether they may is fixed
    until they get another.
    """

    name: str
    place: Place
    kv_rule: KvRule | None = None
    max_behind: int = 2
    needs_next_token: bool = False
    max_depth: int | None = None  # its checkpoint's limit, if it has one
    mark: str = "drafted"  # how clients see a token it drafted
    may_offer_less: bool = False  # than requested, or none: it drafts what it finds

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"a proposer is named {self.name!r}; use letters, digits and _.")

    @property
    def keeps_kv(self) -> bool:
        return self.kv_rule is not None


def autoregressive_kv_rule(
    computed: int, fed: int, drafted: int, accepted: int, base_len: int
) -> int:
    """Of a model that feeds on its own draft tokens, all but the last: the accepted ones stay
    valid."""
    return base_len + min(accepted, max(drafted - 1, 0))
