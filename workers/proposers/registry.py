"""How the proposers of the catalog are built. Proposers of other packages register here.

Proposers are imported when they are built: an engine whose models are elsewhere loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from outrider.catalog import proposers as catalog
from outrider.catalog.heads import HeadKind
from outrider.catalog.proposers import DRAFT, NGRAM, ProposerInfo
from outrider.errors import ConfigError
from outrider.scheduler.proposers import Place, ProposerTraits
from outrider.workers.proposers.base import Proposer, ProposerContext, Proposers

if TYPE_CHECKING:
    from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer

Build: TypeAlias = Callable[[ProposerContext], Proposer]
BuildOnDevice: TypeAlias = "Callable[[DeviceContext], DeviceProposer]"


_Built = TypeVar("_Built")


@dataclass(frozen=True, slots=True)
class ProposerEntry:
    """A proposer on the host's texts and, if it runs on the device, as passes there."""

    info: ProposerInfo
    build: Build
    build_on_device: BuildOnDevice | None = None

    def __post_init__(self) -> None:
        traits = self.traits
        if (traits.place is Place.DEVICE) != (self.build_on_device is not None):
            raise ConfigError(
                f"proposer {traits.name!r} says that it runs on the {traits.place}; one with "
                "device passes runs on the device, any other on the host."
            )

    @property
    def traits(self) -> ProposerTraits:
        return self.info.traits


def register(entry: ProposerEntry) -> None:
    """Call before building an engine that uses it. Adds it to the catalog, too."""
    catalog.add(entry.info)
    _entries[entry.traits.name] = entry


def unregister(name: str) -> None:
    catalog.remove(name)
    del _entries[name]


def entries(*, has_draft_model: bool, head: str | None = None) -> tuple[ProposerEntry, ...]:
    """The proposers of an engine, with a draft model or without, or with a head of this name."""
    found = catalog.traits(has_draft_model=has_draft_model, head=head)
    return tuple(_entries[traits.name] for traits in found)


def build_proposers(context: ProposerContext) -> Proposers:
    """All proposers that can be built from this context."""
    built: dict[str, Proposer] = {}
    with_kv = None
    head = None if context.head is None else context.head.head.spec.kind
    for entry in entries(has_draft_model=context.draft is not None, head=head):
        name = entry.traits.name
        built[name] = _checked(name, entry.build(context), Proposer)
        if entry.traits.keeps_kv:
            with_kv = name
    return Proposers(built, with_kv)


def build_on_device(entry: ProposerEntry, context: DeviceContext) -> DeviceProposer:
    """The passes of a proposer that runs on the device."""
    from outrider.workers.gpu.proposing import DeviceProposer

    assert entry.build_on_device is not None
    return _checked(entry.traits.name, entry.build_on_device(context), DeviceProposer)


def _checked(name: str, built: _Built, base: type) -> _Built:
    if not isinstance(built, base):
        raise ConfigError(
            f"proposer {name!r} is built as {type(built).__name__!r}; derive that class from "
            f"{base.__name__} in {base.__module__}."
        )
    return built


# -- built-in proposers -------------------------------------------------------------------------


def _build_draft_model(context: ProposerContext) -> Proposer:
    from outrider.workers.proposers.draft_model import DraftProposer

    assert context.draft is not None
    return DraftProposer(context.rows, context.draft, context.ops, context.verification)


def _build_draft_passes(context: DeviceContext) -> DeviceProposer:
    from outrider.workers.gpu.drafting import DraftPasses
    from outrider.workers.gpu.mailed_drafts import MailedDrafts

    if context.draft is None:  # it is in a rank of its own
        return MailedDrafts(context)
    return DraftPasses(context.draft, context)


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
    from outrider.workers.gpu.head_passes import HeadPasses

    assert context.head is not None
    return HeadPasses(context.head, context)


def _build_ngram_passes(context: DeviceContext) -> DeviceProposer:
    from outrider.workers.gpu.ngram_lookup import NgramLookupPasses

    return NgramLookupPasses(context)


def _built_in(name: str, build: Build, build_on_device: BuildOnDevice) -> tuple[str, ProposerEntry]:
    return name, ProposerEntry(catalog.info_of(name), build, build_on_device)


_entries: dict[str, ProposerEntry] = dict(
    (
        _built_in(DRAFT, _build_draft_model, _build_draft_passes),
        _built_in(NGRAM, _build_ngram, _build_ngram_passes),
        *(_built_in(kind.value, _build_head, _build_head_passes) for kind in HeadKind),
    )
)
