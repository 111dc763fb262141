"""The catalog of proposers: names and traits. `outrider.workers.proposers.registry` builds them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.catalog.heads import HeadKind
from outrider.errors import ConfigError
from outrider.scheduler.proposers import KvRule, Place, ProposerTraits, autoregressive_kv_rule

# Names of built-in proposers.
DRAFT = "draft"
NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class ProposerInfo:
    """A proposer's traits, and what it needs of an engine.

    A proposer that needs a draft model runs in its processes; all others run beside the target. A
    head comes with the target and reads the hidden states that its checkpoint names.
    """

    traits: ProposerTraits
    needs_draft_model: bool = False
    needs_head: bool = False  # of the same name


def _head(kind: HeadKind) -> ProposerInfo:
    needs_next_token = kind is HeadKind.EAGLE3
    traits = ProposerTraits(
        kind.value, Place.DEVICE, needs_next_token=needs_next_token, mark=kind.value
    )
    return ProposerInfo(traits, needs_head=True)


_BUILT_IN = (
    ProposerInfo(
        ProposerTraits(DRAFT, Place.DEVICE, kv_rule=autoregressive_kv_rule, mark=DRAFT),
        needs_draft_model=True,
    ),
    ProposerInfo(ProposerTraits(NGRAM, Place.DEVICE, mark=NGRAM, may_offer_less=True)),
    *map(_head, HeadKind),
)
_infos = {info.traits.name: info for info in _BUILT_IN}


def add(info: ProposerInfo) -> None:
    """`outrider.workers.proposers.registry.register` calls this for proposers of other packages."""
    name = info.traits.name
    if name in _infos:
        raise ConfigError(f"proposer {name!r} is registered already; choose another name.")
    _infos[name] = info


def remove(name: str) -> None:
    del _infos[name]


def proposer_names() -> tuple[str, ...]:
    return tuple(_infos)


def info_of(name: str) -> ProposerInfo:
    return _infos[name]


def kv_rule_of(name: str) -> KvRule:
    """The rule of a proposer that keeps KV in the draft pool."""
    rule = info_of(name).traits.kv_rule
    assert rule is not None, f"proposer {name!r} keeps no KV in the draft pool"
    return rule


def traits(*, has_draft_model: bool, head: str | None = None) -> tuple[ProposerTraits, ...]:
    """The proposers of an engine, with a draft model or without, or with a head of this name."""
    return tuple(
        info.traits
        for info in _infos.values()
        if (has_draft_model or not info.needs_draft_model)
        and (info.traits.name == head or not info.needs_head)
    )


def mark_of(name: str) -> str:
    """How clients see tokens drafted by `name`, which may be unknown to this release."""
    info = _infos.get(name)
    return name if info is None else info.traits.mark
