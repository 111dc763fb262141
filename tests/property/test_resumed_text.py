"""Text that goes on where a reader stopped, wherever that was and however it came there."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.checkpoints.resolve import BUNDLED_DRAFT
from outrider.errors import RequestError
from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import FinishReason, RequestUpdate, SampleId
from outrider.text.builder import ResumedText, TextBuilder, text_builders
from outrider.text.input_processor import InputProcessor
from outrider.text.outputs import OutputDelta
from outrider.text.tokenizer import load_tokenizer

FACTS = EngineFacts({"target.model": BUNDLED_DRAFT}, 49152, (2,), 512, 2, False, "", 8)
PROMPT = [504, 1000, 20000]
# Spaces that join, letters of several tokens, special tokens, and what stop strings are made of.
WORDS = "one two three four 漢字 🦙🦙 naïve <|im_start|> three four five"


@cache
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED_DRAFT)


@cache
def input_processor() -> InputProcessor:
    return InputProcessor(FACTS, tokenizer())


@cache
def alphabet() -> list[int]:
    return sorted({*tokenizer().encode(WORDS), *range(150, 250, 9)})


def builder(**params: Any) -> TextBuilder:
    given = SamplingParams(**params)
    prepared = input_processor().prepare("r", PROMPT, given)
    return text_builders(prepared, tokenizer(), 0.0)[1][0]


def read(text: TextBuilder, tokens: list[int], sizes: list[int]) -> list[OutputDelta]:
    """The tokens in updates of these sizes, as far as the text goes."""
    deltas: list[OutputDelta] = []
    start = 0
    while start < len(tokens) and not text.output.finished:
        end = min(start + sizes[len(deltas) % len(sizes)], len(tokens))
        reason = FinishReason.LENGTH if end == len(tokens) else None
        update = RequestUpdate(SampleId(0, 1), tuple(tokens[start:end]), finish_reason=reason)
        deltas.append(text.take(update, 0.0))
        start = end
    return deltas


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_text_goes_on_exactly_where_the_reader_is(data: Any) -> None:
    params = {
        "stop": data.draw(st.sampled_from([[], ["three four five"], ["ee f", "🦙"], [" "]])),
        "echo": data.draw(st.booleans()),
        "min_tokens": data.draw(st.sampled_from([0, 3])),
        "skip_special_tokens": data.draw(st.booleans()),
        "include_stop_str_in_output": data.draw(st.booleans()),
    }
    tokens = data.draw(st.lists(st.sampled_from(alphabet()), min_size=1, max_size=30))
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)
    undisturbed = builder(**params)
    deltas = read(undisturbed, tokens, data.draw(sizes))
    told = deltas[: data.draw(st.integers(1, len(deltas)))]
    if told[-1].finish_reason is not None:
        return
    had = tuple(token for delta in told for token in delta.token_ids)
    resumed = builder(**params)
    held = resumed.resume_from(ResumedText(0, had))
    assert held.text == "".join(delta.text for delta in told)
    read(resumed, tokens[len(had) :], data.draw(sizes))
    assert resumed.output.text == undisturbed.output.text
    assert resumed.output.token_ids == undisturbed.output.token_ids
    assert resumed.output.stop_reason == undisturbed.output.stop_reason


def test_tokens_behind_a_stop_string_are_nothing_to_go_on_from() -> None:
    tokens = tuple(tokenizer().encode("one two three four"))
    with pytest.raises(RequestError, match="go on after the stop string 'two'"):
        builder(stop=["two"]).resume_from(ResumedText(0, tokens))
