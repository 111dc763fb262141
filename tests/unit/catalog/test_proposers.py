"""The catalog of proposers, and that workers build exactly what it lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.catalog import proposers as catalog
from outrider.catalog.heads import HeadKind
from outrider.catalog.proposers import DRAFT, NGRAM, ProposerInfo, mark_of, proposer_names, traits
from outrider.errors import ConfigError
from outrider.scheduler.proposers import Place, ProposerTraits
from outrider.workers.proposers.base import Proposer, ProposerContext, ProposerSettings
from outrider.workers.proposers.registry import (
    ProposerEntry,
    build_proposers,
    entries,
    register,
    unregister,
)
from outrider.workers.rows import RowTable


def _build(context: ProposerContext) -> Proposer:
    raise AssertionError("these tests build nothing")


@pytest.fixture
def parrot() -> Iterator[str]:
    register(ProposerEntry(ProposerInfo(ProposerTraits("parrot", Place.HOST, mark="bird")), _build))
    yield "parrot"
    unregister("parrot")


def test_the_built_in_proposers_are_draft_ngram_and_heads() -> None:
    assert proposer_names() == (DRAFT, NGRAM, *HeadKind)


@pytest.mark.parametrize("has_draft_model", [False, True])
@pytest.mark.parametrize("head", [None, *HeadKind])
def test_workers_build_what_the_catalog_lists(has_draft_model: bool, head: str | None) -> None:
    listed = traits(has_draft_model=has_draft_model, head=head)
    built = entries(has_draft_model=has_draft_model, head=head)
    assert tuple(entry.traits for entry in built) == listed
    expected = {NGRAM} | ({DRAFT} if has_draft_model else set()) | ({head} if head else set())
    assert {each.name for each in listed} == expected


def test_a_registered_proposer_is_in_the_catalog_until_it_is_unregistered(parrot: str) -> None:
    assert parrot in proposer_names()
    assert mark_of(parrot) == "bird"
    unregister(parrot)
    try:
        assert parrot not in proposer_names()
        assert mark_of(parrot) == parrot
    finally:
        register(ProposerEntry(ProposerInfo(ProposerTraits(parrot, Place.HOST)), _build))


def test_a_name_is_in_the_catalog_once() -> None:
    with pytest.raises(ConfigError, match="'ngram' is registered already"):
        catalog.add(ProposerInfo(ProposerTraits(NGRAM, Place.HOST)))


def test_a_device_proposer_without_device_passes_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'parrot' says that it runs on the device"):
        ProposerEntry(ProposerInfo(ProposerTraits("parrot", Place.DEVICE)), _build)


def test_a_proposer_not_derived_from_the_base_is_rejected() -> None:
    def build(context: ProposerContext) -> Any:
        return Stray()

    register(ProposerEntry(ProposerInfo(ProposerTraits("stray", Place.HOST)), build))
    try:
        ops: Any = None
        with pytest.raises(ConfigError, match="'stray' is built as 'Stray'; derive that class"):
            build_proposers(ProposerContext(RowTable(1), ProposerSettings(1, 4), ops, "shared"))
    finally:
        unregister("stray")


class Stray:
    """Knows nothing of the contract."""
