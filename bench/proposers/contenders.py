"""Who is compared: plain decoding, n-gram look-up, and the drafts and heads that are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.scheduler.params import MAX_FIXED_DEPTH
from outrider.workers.heads.formats import load_head_spec
from outrider.workers.weights.checkpoint import load_spec
from outrider.workers.weights.resolve import BUNDLED_DRAFT, BUNDLED_TARGET

CHECKPOINT = "checkpoint"  # what a training calls the folder it leaves


class Kind(StrEnum):
    OFF = "off"
    NGRAM = "ngram"
    DRAFT = "draft"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    kind: Kind
    source: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of an `LLM` in which it proposes."""
        if self.kind in (Kind.OFF, Kind.NGRAM):
            return {"method": self.kind.value}
        return {f"{self.kind}_model": self.source}


@dataclass(frozen=True, slots=True)
class Variant:
    contender: Contender
    depth: int  # 0: nobody proposes

    @property
    def name(self) -> str:
        return f"{self.contender.name} at depth {self.depth}" if self.depth else self.contender.name

    @property
    def key(self) -> dict[str, Any]:
        """What tells its figures from others."""
        own = self.contender
        return {"proposer": own.name, "kind": own.kind.value, "depth": self.depth}


def contenders(
    target: str, drafts: Sequence[str], heads: Sequence[str], *, has_ngram: bool = True
) -> list[Contender]:
    """Plain decoding first, which the others are compared with. The bundled draft is there if
    nothing else is given for the bundled target."""
    if not drafts and not heads and target == BUNDLED_TARGET:
        drafts = [f"draft={BUNDLED_DRAFT}"]
    found = [Contender("plain", Kind.OFF)]
    if has_ngram:
        found.append(Contender("n-gram", Kind.NGRAM))
    found += [_given(text, Kind.DRAFT) for text in drafts]
    found += [_given(text, Kind.HEAD) for text in heads]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two proposers are called {name!r}; give them names, as --draft NAME=PATH."
            )
    return found


def check_sources(target: str, found: Sequence[Contender]) -> None:
    """One sentence about a draft or head that cannot be had, or is for another target, before
    anything is measured."""
    spec = load_spec(target)
    for each in found:
        if each.kind is Kind.HEAD and each.source is not None:
            load_head_spec(each.source, spec)
        elif each.kind is Kind.DRAFT and each.source is not None:
            load_spec(each.source)


def variants(found: Sequence[Contender], depths: Sequence[int]) -> list[Variant]:
    for depth in depths:
        if not 1 <= depth <= MAX_FIXED_DEPTH:
            raise ConfigError(f"--depths has {depth}; give 1 to {MAX_FIXED_DEPTH}.")
    if not depths:
        raise ConfigError("--depths is empty; give one at least, as 3,5.")
    return [
        Variant(each, depth)
        for each in found
        for depth in ([0] if each.kind is Kind.OFF else sorted(set(depths)))
    ]


def _given(text: str, kind: Kind) -> Contender:
    """`NAME=PATH`, or a path, which is named after its folder."""
    name, has_name, source = text.partition("=")
    if not has_name or "/" in name:
        path = Path(text)
        source = text
        name = path.parent.name if path.name == CHECKPOINT and path.parent.name else path.name
    if not name or not source:
        raise ConfigError(f"--{kind} is {text!r}; give PATH or NAME=PATH.")
    return Contender(name, kind, source)
