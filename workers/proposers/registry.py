"""The proposers there are. To add one: its own file, an entry here, and tests.

Nothing is imported before it is built: configuration, front door and gateway ask this registry for
names, and they have no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from outrider.errors import ConfigError
from outrider.scheduler.proposers import Place, ProposerTraits, own_guesses_kept
from outrider.scheduler.types import StepPlan
from outrider.workers.heads.spec import HeadKind
from outrider.workers.proposers.base import DRAFT, NGRAM, Proposer, ProposerContext, Proposers

if TYPE_CHECKING:
    from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer

Build: TypeAlias = Callable[[ProposerContext], Proposer]
BuildOnDevice: TypeAlias = "Callable[[DeviceContext], DeviceProposer]"


@dataclass(frozen=True, slots=True)
class ProposerEntry:
    """How a proposer is made: on the host's texts, and, if it runs on the device, as passes there.

    One that needs a draft model runs where that model is; all others run beside the target. A head
    comes with the target and reads the hidden states that its checkpoint names.
    """

    traits: ProposerTraits
    build: Build
    build_on_device: BuildOnDevice | None = None
    needs_draft_model: bool = False
    needs_head: bool = False  # of its own name

    def __post_init__(self) -> None:
        traits = self.traits
        if (traits.place is Place.DEVICE) != (self.build_on_device is not None):
            raise ConfigError(
                f"proposer {traits.name!r} says that it runs on the {traits.place}; one with "
                "passes of its own runs on the device, any other on the host."
            )


_entries: dict[str, ProposerEntry] = {}


def register(entry: ProposerEntry) -> None:
    """Before any engine is built that is to have it."""
    name = entry.traits.name
    if name in _entries:
        raise ConfigError(f"proposer {name!r} is registered already; choose another name.")
    _entries[name] = entry


def unregister(name: str) -> None:
    del _entries[name]


def proposer_names() -> tuple[str, ...]:
    return tuple(_entries)


def entries(*, has_draft_model: bool, head: str | None = None) -> tuple[ProposerEntry, ...]:
    """Those an engine has, with a draft model or without, or with a head of this name."""
    return tuple(
        entry
        for entry in _entries.values()
        if (has_draft_model or not entry.needs_draft_model)
        and (entry.traits.name == head or not entry.needs_head)
    )


def traits(*, has_draft_model: bool, head: str | None = None) -> tuple[ProposerTraits, ...]:
    return tuple(entry.traits for entry in entries(has_draft_model=has_draft_model, head=head))


def has_round(plan: StepPlan) -> bool:
    """Whether the draft model drafts for any row of the plan."""
    return any(row.proposer == DRAFT for row in plan.rows)


def mark_of(name: str) -> str:
    """What a reader is told of tokens that `name` drafted; it may be another release's."""
    entry = _entries.get(name)
    return name if entry is None else entry.traits.mark


def build_proposers(context: ProposerContext) -> Proposers:
    """All that can be built from this context."""
    built: dict[str, Proposer] = {}
    with_kv = None
    head = None if context.head is None else context.head.head.spec.kind
    for entry in entries(has_draft_model=context.draft is not None, head=head):
        name = entry.traits.name
        built[name] = entry.build(context)
        if entry.traits.keeps_kv:
            with_kv = name
    return Proposers(built, with_kv)


# -- the ones that come with Outrider -----------------------------------------------------------


def _build_draft_model(context: ProposerContext) -> Proposer:
    from outrider.workers.proposers.draft_model import DraftProposer

    assert context.draft is not None
    return DraftProposer(context.rows, context.draft, context.ops, context.verification)


def _build_draft_passes(context: DeviceContext) -> DeviceProposer:
    from outrider.workers.gpu.drafting import DraftPasses

    assert context.draft is not None
    return DraftPasses(context.draft, context.state, context.entries, context.sizes)


def _build_ngram(context: ProposerContext) -> Proposer:
    from outrider.workers.proposers.ngram import NgramProposer

    return NgramProposer(context.rows, context.settings.ngram_min, context.settings.ngram_max)


def _build_head(context: ProposerContext) -> Proposer:
    from outrider.workers.proposers.head import HeadProposer

    head = context.head
    assert head is not None
    name = head.head.spec.kind.value
    return HeadProposer(name, context.rows, head, context.ops, context.verification)


def _build_head_passes(context: DeviceContext) -> DeviceProposer:
    from outrider.workers.gpu.heading import HeadPasses

    assert context.head is not None
    return HeadPasses(context.head, context.passes, context.state, context.entries, context.sizes)


def _build_look_up_passes(context: DeviceContext) -> DeviceProposer:
    from outrider.workers.gpu.look_up import LookUpPasses

    return LookUpPasses(context)


register(
    ProposerEntry(
        ProposerTraits(DRAFT, Place.DEVICE, kv_rule=own_guesses_kept, mark=DRAFT),
        _build_draft_model,
        _build_draft_passes,
        needs_draft_model=True,
    )
)
register(
    ProposerEntry(
        ProposerTraits(NGRAM, Place.DEVICE, mark=NGRAM, may_offer_less=True),
        _build_ngram,
        _build_look_up_passes,
    )
)
for kind in HeadKind:
    looks_ahead = kind is HeadKind.EAGLE3
    register(
        ProposerEntry(
            ProposerTraits(kind.value, Place.DEVICE, looks_ahead=looks_ahead, mark=kind.value),
            _build_head,
            _build_head_passes,
            needs_head=True,
        )
    )
