"""The codec: what it refuses, and in which words."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest

from outrider.compat_fields import added_field, added_field_defaults, without_added_fields
from outrider.links import fleet_messages, gateway_messages
from outrider.links import rank_messages as messages
from outrider.links.cluster_view import ClusterView, ReplicaView
from outrider.links.codec import FLEET_CODEC, GATEWAY_CODEC, RANK_CODEC, STORE_CODEC, Codec
from outrider.links.fleet_messages import ViewClusterResult
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import EngineCounters, EngineStatus
from outrider.links.rank_messages import (
    DraftGroupJoined,
    LoadWeights,
    RankFailed,
    StepPlans,
    StopRank,
    VerifyResult,
)
from outrider.links.tags import message
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import (
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    TokenLogprobs,
    Verdict,
)

DATA = Path(__file__).parents[2] / "data"
IMPORT_ALL = """
import importlib, pkgutil, sys
import outrider.links as links
names = [module.name for module in pkgutil.iter_modules(links.__path__)]
for name in names:
    importlib.import_module("outrider.links." + name)
assert "channel" in names
print(*sorted({"torch", "ray", "grpc", "numpy"} & set(sys.modules)))
"""


def test_links_load_neither_torch_nor_ray_nor_grpc() -> None:
    command = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_plan_comes_back_with_its_rows_and_requests() -> None:
    row = RowPlan(3, 1, 1, 5, 4, True, "ngram", 4, (7, 8), 4, (), 2)
    admitted = RowInit(
        3,
        1,
        SampleId(1, 5),
        token_ids=(1, 2, 3),
        prompt_len=3,
        params=SamplingParams(logit_bias={5: -1.5}, stop="end"),
        seed=2**64 - 1,
        bad_word_ids=((1,), (2, 3)),
    )
    sent = StepPlans(3, (StepPlan(1, 2, (row,), (admitted,), (9,)),))
    got = RANK_CODEC.decode(RANK_CODEC.encode(sent))
    assert got == sent
    assert isinstance(got.plans[0].rows[0], RowPlan)
    assert got.plans[0].admitted[0].params.logit_bias == {5: -1.5}


def test_an_impossible_token_keeps_its_infinite_logprob() -> None:
    position = TokenLogprobs(4, -math.inf, 9, ((4, -math.inf), (5, -0.25)))
    sent = VerifyResult(Verdict(1, 2, (RowVerdict(0, 1, 5, 2, 2, 1, (4,), (position,)),)), False)
    got = RANK_CODEC.decode(RANK_CODEC.encode(sent))
    assert got == sent
    assert isinstance(got.verdict.rows[0].logprobs[0], TokenLogprobs)


def test_a_message_without_fields_is_a_message() -> None:
    assert RANK_CODEC.decode(RANK_CODEC.encode(StopRank())) == StopRank()


@message("Message")
@dataclass(frozen=True)
class Before:
    """A message of an older release."""

    number: int


@message("Message")
@dataclass(frozen=True)
class Since:
    """The same message with fields that were added."""

    number: int
    text: str = added_field("")
    numbers: tuple[int, ...] = added_field(())


def test_releases_with_and_without_added_fields_understand_each_other() -> None:
    old, new = Codec(Before), Codec(Since)
    assert old.decode(new.encode(Since(1))) == Before(1)
    assert new.decode(old.encode(Before(1))) == Since(1)
    assert new.decode(new.encode(Since(1, "", (2,)))) == Since(1, "", (2,))
    with pytest.raises(LinkError, match="came with 2 fields, this process knows 1"):
        old.decode(new.encode(Since(1, "more")))


# By revision; a field that is added makes another one.
NUM_ADDED = {gateway_messages: {1: 4, 2: 6, 3: 7}, fleet_messages: {1: 1}}


@pytest.mark.parametrize("module", NUM_ADDED)
def test_added_fields_have_a_revision_of_their_own(module: Any) -> None:
    kinds = [each for each in vars(module).values() if isinstance(each, type)]
    found = [added_field_defaults(each) for each in kinds if dataclasses.is_dataclass(each)]
    assert sum(map(len, found)) == NUM_ADDED[module][module.REVISION]


def refusal(payload: object) -> str:
    with pytest.raises(LinkError) as caught:
        RANK_CODEC.decode(msgpack.packb(payload))
    return str(caught.value)


def test_an_unknown_message_is_named() -> None:
    sentence = refusal(["Sing", 1])
    assert "'Sing'" in sentence and "same release" in sentence


def test_a_newer_message_with_more_fields_is_refused() -> None:
    assert refusal(["Join", 3, True]).startswith("a Join came with 2 fields, this process knows")


def test_a_nested_class_with_fewer_fields_is_refused() -> None:
    assert "a Verdict came with 2 fields" in refusal(["Judged", [1, 2], False, 0.0])


def test_a_row_of_another_length_is_refused() -> None:
    rows = [[0, 1, 5, 2, 2, 1, [4], [], [], False, "new"]]
    assert "a RowVerdict came with 11 fields" in refusal(
        ["Judged", [1, 2, rows, 0.0, 0.0, []], False, 0.0]
    )


def test_a_field_of_another_type_is_named() -> None:
    assert refusal(["Join", "3"]).startswith("Join.number came as '3'")


def test_an_unknown_word_of_an_enum_is_refused() -> None:
    update = [[1, 5], [1], 0, 0, 0, [], [], "bored", None, 0, 0.0]
    with pytest.raises(LinkError, match="Updates cannot be decoded"):
        GATEWAY_CODEC.decode(msgpack.packb(["Updates", [update], 0]))


def test_parameters_that_are_not_allowed_are_refused() -> None:
    params = RANK_CODEC.encode(_adopting(SamplingParams(top_p=0.5)))
    broken = params.replace(msgpack.packb(0.5), msgpack.packb(7.5))
    with pytest.raises(LinkError, match="top_p is 7.5"):
        RANK_CODEC.decode(broken)


def _adopting(params: SamplingParams) -> messages.Adopt:
    return messages.Adopt(1, (RowInit(0, 1, SampleId(1, 5), (1,), 1, params, 3),))


@pytest.mark.parametrize("payload", [{}, [], 7, "Load", [7, "Load"], None])
def test_what_is_no_message_is_refused(payload: object) -> None:
    assert "tag of a message" in refusal(payload)


def test_a_payload_that_is_cut_off_is_refused() -> None:
    with pytest.raises(LinkError, match="not msgpack"):
        RANK_CODEC.decode(RANK_CODEC.encode(RankFailed("out of memory"))[:-3])


def test_a_whole_number_may_stand_for_a_float() -> None:
    drafted = RANK_CODEC.decode(RANK_CODEC.encode(messages.DraftReport(1, 2, ())))
    assert drafted.caught_up_s == 2


def test_a_message_of_another_link_cannot_be_sent() -> None:
    with pytest.raises(
        LinkError, match="DraftGroupJoined is no message of this link; it carries Load"
    ):
        Codec(LoadWeights).encode(DraftGroupJoined("tcp"))


def test_a_value_that_msgpack_does_not_know_is_told_by_name() -> None:
    with pytest.raises(LinkError, match="a RankFailed cannot be encoded.*object"):
        RANK_CODEC.encode(RankFailed(object()))  # type: ignore[arg-type]


def test_a_number_over_64_bits_is_told_when_it_is_sent() -> None:
    with pytest.raises(LinkError, match="a LoadWeights cannot be encoded"):
        RANK_CODEC.encode(LoadWeights(2**64))


@dataclass(frozen=True)
class Either:
    """Two classes that the wire could not tell apart."""

    value: LoadWeights | StopRank


@dataclass(frozen=True)
class Unclear:
    value: types.SimpleNamespace


@pytest.mark.parametrize(("cls", "reason"), [(Either, "ambiguous"), (Unclear, "SimpleNamespace")])
def test_a_class_that_cannot_travel_is_refused_when_the_codec_is_built(
    cls: type, reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        Codec(cls)


def test_two_messages_of_one_tag_are_refused_when_the_codec_is_built() -> None:
    with pytest.raises(TypeError, match="two message classes have the tag Load"):
        Codec(LoadWeights, message("Load")(dataclass(type("Other", (), {}))))


@pytest.mark.parametrize("codec", ["rank", "gateway", "store", "fleet"])
def test_tags_are_those_of_the_releases_before(codec: str) -> None:
    codecs = {"rank": RANK_CODEC, "gateway": GATEWAY_CODEC, "store": STORE_CODEC}
    known = (codecs | {"fleet": FLEET_CODEC})[codec]._readers
    frozen = json.loads((DATA / "link_tags.json").read_text())[codec]
    assert set(frozen) <= set(known), "a peer of the release before sends these"


# -- fields that were added -------------------------------------------------------------------

# As the release before had them.
OLD_REPLICA = ["0", "serving", 1, 2]
OLD_VIEW = ["c", "serving", 1, 2, [], [OLD_REPLICA], None]


def packed(message: object) -> object:
    return msgpack.unpackb(FLEET_CODEC.encode(message))


def test_a_message_of_a_release_without_a_field_is_understood() -> None:
    found = FLEET_CODEC.decode(msgpack.packb(["ClusterViewed", 1, OLD_VIEW]))
    assert found.view.num_configured is None
    assert found.view.replicas == (ReplicaView("0", "serving", 1, 2),)


def test_a_field_that_was_added_is_left_out_while_it_has_its_default() -> None:
    view = ClusterView("c", "serving", 1, 2, (), (ReplicaView("0", "serving", 1, 2),))
    assert packed(ViewClusterResult(1, view)) == ["ClusterViewed", 1, OLD_VIEW]


def test_a_field_that_was_added_arrives_and_can_be_taken_back() -> None:
    replica = ReplicaView("0", "serving", 1, 2, start_s=3.5)
    sent = ViewClusterResult(1, ClusterView("c", "serving", 1, 2, (), (replica,), num_configured=2))
    assert FLEET_CODEC.decode(FLEET_CODEC.encode(sent)) == sent
    assert packed(without_added_fields(sent)) == ["ClusterViewed", 1, OLD_VIEW]


def test_a_field_after_those_that_were_added_is_a_mistake() -> None:
    @dataclass
    class Grown:
        first: int = added_field(0)
        second: int = 0

    with pytest.raises(TypeError, match="Grown has fields after those that were added"):
        Codec(Grown)


def test_a_status_reaches_a_gateway_that_has_no_added_counters() -> None:
    counters = EngineCounters(displaced=3)
    status = EngineStatus(1, (), "", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, counters=counters)
    sent, expected = (
        without_added_fields(status),
        dataclasses.replace(status, counters=EngineCounters()),
    )
    assert GATEWAY_CODEC.decode(GATEWAY_CODEC.encode(status)) == status
    assert GATEWAY_CODEC.encode(sent) == GATEWAY_CODEC.encode(expected)
