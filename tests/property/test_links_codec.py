"""Whatever a message may hold comes back equal, in the same types, and noise never does harm."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.links import gateway_messages, rank_messages
from outrider.links.codec import GATEWAY_CODEC, RANK_CODEC, Codec
from outrider.links.frames import FrameDecoder, LinkError, pack
from outrider.links.tags import is_message
from outrider.scheduler.params import SamplingParams

LETTERS = "ab\0\n é漢🙂"
TEXT = st.text(LETTERS, max_size=8)
SOME_TEXT = st.text(LETTERS, min_size=1, max_size=4)
TOKENS = st.lists(st.integers(0, 2**31), max_size=3)
FLOATS = st.floats(allow_nan=False)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: FLOATS,
    str: TEXT,
    bool: st.booleans(),
    types.NoneType: st.none(),
    Any: st.one_of(TEXT, st.integers(-(2**63), 2**64 - 1), FLOATS, st.booleans(), st.none()),
}
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 1000),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
    bad_words=st.lists(SOME_TEXT, max_size=2),
    max_tokens=st.none() | st.integers(1, 10**6),
    stop=st.none() | SOME_TEXT | st.lists(SOME_TEXT, max_size=2),
    stop_token_ids=TOKENS,
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    speculation=st.sampled_from([None, "draft", "ngram", "off"]),
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a type hint allows."""
    if hint in PLAIN:
        return PLAIN[hint]
    if hint is SamplingParams:
        return PARAMS
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=4)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{name: values(hint) for name, hint in hints.items()})


def dataclasses_of(module: types.ModuleType) -> list[type]:
    found = [value for value in vars(module).values() if isinstance(value, type)]
    return [cls for cls in found if dataclasses.is_dataclass(cls)]


def assert_same(got: Any, sent: Any) -> None:
    """Equal, and of the same types throughout (1 == 1.0 and an IntEnum equals its number)."""
    assert type(got) is type(sent)
    assert got == sent
    if isinstance(sent, tuple):
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(sent):
        for field in dataclasses.fields(sent):
            assert_same(getattr(got, field.name), getattr(sent, field.name))


@pytest.mark.parametrize("cls", dataclasses_of(rank_messages))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_message_between_engine_and_ranks_comes_back_the_same(
    cls: type, data: st.DataObject
) -> None:
    codec = RANK_CODEC if is_message(cls) else Codec(cls)
    message = data.draw(values(cls))
    assert_same(codec.decode(codec.encode(message)), message)


@pytest.mark.parametrize("cls", dataclasses_of(gateway_messages))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_message_between_gateway_and_engine_comes_back_the_same(
    cls: type, data: st.DataObject
) -> None:
    codec = GATEWAY_CODEC if is_message(cls) else Codec(cls)
    message = data.draw(values(cls))
    assert_same(codec.decode(codec.encode(message)), message)


@settings(max_examples=200, deadline=None)
@given(noise=st.binary(max_size=64))
def test_noise_is_a_link_error_or_a_message_but_nothing_else(noise: bytes) -> None:
    try:
        RANK_CODEC.decode(noise)
    except LinkError as error:
        assert str(error).endswith(".")


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_damaged_message_is_a_link_error_or_a_message_but_nothing_else(
    data: st.DataObject,
) -> None:
    encoded = bytearray(RANK_CODEC.encode(data.draw(values(rank_messages.StepPlans))))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] = data.draw(st.integers(0, 255))
    try:
        RANK_CODEC.decode(bytes(encoded))
    except LinkError as error:
        assert str(error).endswith(".")


@settings(max_examples=100, deadline=None)
@given(
    payloads=st.lists(st.binary(max_size=40), max_size=5),
    cuts=st.lists(st.integers(0, 250), max_size=12),
)
def test_frames_come_out_whole_however_the_stream_is_cut(
    payloads: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(pack, payloads))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    decoder = FrameDecoder()
    found: list[bytes] = []
    for start, end in zip(edges, edges[1:], strict=False):
        found += decoder.feed(stream[start:end])
    assert found == payloads
