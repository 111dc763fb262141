"""Who is compared, and under which names."""

from __future__ import annotations

import pytest

from outrider.benchmarks.proposers.contenders import Contender, ProposerKind, contenders, variants
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.errors import ConfigError


def test_the_bundled_target_comes_with_its_draft_unless_others_are_given() -> None:
    names = {each.name: each.source for each in contenders(BUNDLED_TARGET, [], [])}
    assert names == {"plain": None, "n-gram": None, "draft": BUNDLED_DRAFT}

    given = contenders(BUNDLED_TARGET, [], ["./eagle"], has_ngram=False)
    assert [each.name for each in given] == ["plain", "eagle"]


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("a=./x/y", "a", "./x/y"),
        ("./x/y", "y", "./x/y"),
        ("./runs/eagle/checkpoint", "eagle", "./runs/eagle/checkpoint"),
        ("./lr=2e-3/y", "y", "./lr=2e-3/y"),
    ],
)
def test_a_proposer_is_named_by_its_user_or_its_folder(text: str, name: str, source: str) -> None:
    assert contenders("t", [text], [])[-1] == Contender(name, ProposerKind.DRAFT, source)


def test_two_proposers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two proposers are called 'x'"):
        contenders("t", ["a/x"], ["b/x"])
    with pytest.raises(ConfigError, match="--head is 'x='; give PATH or NAME=PATH"):
        contenders("t", [], ["x="])


def test_every_proposer_has_every_depth_and_plain_decoding_none() -> None:
    found = variants(contenders("t", ["d"], []), [5, 3])

    names = [each.name for each in found]
    assert names == [
        "plain",
        *(f"{name} at depth {depth}" for name in ("n-gram", "d") for depth in (3, 5)),
    ]


@pytest.mark.parametrize(
    ("depths", "message"), [([9], "has 9; give 1 to 8"), ([0], "has 0"), ([], "is empty")]
)
def test_depths_that_cannot_be_fixed_are_refused(depths: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants(contenders("t", [], []), depths)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ProposerKind.OFF, {"method": "off"}),
        (ProposerKind.NGRAM, {"method": "ngram"}),
        (ProposerKind.DRAFT, {"draft_model": "x"}),
        (ProposerKind.HEAD, {"head_model": "x"}),
    ],
)
def test_each_kind_is_an_option_of_the_engine(kind: ProposerKind, options: dict[str, str]) -> None:
    assert Contender("a", kind, "x").options == options
