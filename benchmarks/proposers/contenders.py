"""The compared proposers: plain decoding, n-gram lookup, and the given drafts and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.errors import ConfigError
from outrider.scheduler.params import MAX_FIXED_DEPTH
from outrider.workers.heads.formats import load_head_spec
from outrider.workers.weights.checkpoint import load_spec

CHECKPOINT = "checkpoint"  # the folder that a distillation writes


class ProposerKind(StrEnum):
    OFF = "off"
    NGRAM = "ngram"
    DRAFT = "draft"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    kind: ProposerKind
    source: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of an `LLM` with this proposer."""
        if self.kind in (ProposerKind.OFF, ProposerKind.NGRAM):
            return {"method": self.kind.value}
        return {f"{self.kind}_model": self.source}


@dataclass(frozen=True, slots=True)
class ProposerVariant:
    contender: Contender
    depth: int  # 0: plain decoding

    @property
    def name(self) -> str:
        return f"{self.contender.name} at depth {self.depth}" if self.depth else self.contender.name

    @property
    def key(self) -> dict[str, Any]:
        """The key of its records."""
        own = self.contender
        return {"proposer": own.name, "kind": own.kind.value, "depth": self.depth}


def contenders(
    target: str, drafts: Sequence[str], heads: Sequence[str], *, has_ngram: bool = True
) -> list[Contender]:
    """Plain decoding, the reference, comes first. The bundled target has the bundled draft if no
    other proposer is given."""
    if not drafts and not heads and target == BUNDLED_TARGET:
        drafts = [f"draft={BUNDLED_DRAFT}"]
    found = [Contender("plain", ProposerKind.OFF)]
    if has_ngram:
        found.append(Contender("n-gram", ProposerKind.NGRAM))
    found += [_parse_source(text, ProposerKind.DRAFT) for text in drafts]
    found += [_parse_source(text, ProposerKind.HEAD) for text in heads]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two proposers are called {name!r}; give them names, as --draft NAME=PATH."
            )
    return found


def check_sources(target: str, found: Sequence[Contender]) -> None:
    """Raise before anything is measured if a draft or head is missing or for another target."""
    spec = load_spec(target)
    for each in found:
        if each.kind is ProposerKind.HEAD and each.source is not None:
            load_head_spec(each.source, spec)
        elif each.kind is ProposerKind.DRAFT and each.source is not None:
            load_spec(each.source)


def variants(found: Sequence[Contender], depths: Sequence[int]) -> list[ProposerVariant]:
    for depth in depths:
        if not 1 <= depth <= MAX_FIXED_DEPTH:
            raise ConfigError(f"--depths has {depth}; give 1 to {MAX_FIXED_DEPTH}.")
    if not depths:
        raise ConfigError("--depths is empty; give one at least, as 3,5.")
    return [
        ProposerVariant(each, depth)
        for each in found
        for depth in ([0] if each.kind is ProposerKind.OFF else sorted(set(depths)))
    ]


def _parse_source(text: str, kind: ProposerKind) -> Contender:
    """`NAME=PATH`, or a path, named after its folder."""
    name, has_name, source = text.partition("=")
    if not has_name or "/" in name:
        path = Path(text)
        source = text
        name = path.parent.name if path.name == CHECKPOINT and path.parent.name else path.name
    if not name or not source:
        raise ConfigError(f"--{kind} is {text!r}; give PATH or NAME=PATH.")
    return Contender(name, kind, source)
