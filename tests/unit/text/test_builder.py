"""What a request of many samples and log-probabilities asks of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.checkpoints.resolve import BUNDLED_DRAFT
from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import RequestUpdate, SampleId, TokenLogprobs
from outrider.text.builder import TextBuilder, text_builders
from outrider.text.input_processor import InputProcessor
from outrider.text.tokenizer import load_tokenizer

FACTS = EngineFacts({"target.model": BUNDLED_DRAFT}, 49152, (2,), 512, 2, False, "", 8)
PROMPT = [504, 1000, 20000, 504]


class Noting:
    """A tokenizer that notes what it decoded."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.decoded: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.decoded.append(tuple(ids))
        return str(self._inner.decode(ids, **options))


@pytest.fixture
def tokenizer() -> Noting:
    return Noting(load_tokenizer(BUNDLED_DRAFT))


def _builders(tokenizer: Noting, **params: Any) -> list[TextBuilder]:
    prepared = InputProcessor(FACTS, tokenizer).prepare("r", PROMPT, SamplingParams(**params))
    return text_builders(prepared, tokenizer, 0.0)[1]


def test_the_prompt_is_decoded_once_for_the_echo_of_all_samples(tokenizer: Noting) -> None:
    builders = _builders(tokenizer, n=8, echo=True)
    assert tokenizer.decoded.count(tuple(PROMPT)) == 1
    texts = {each.take(RequestUpdate(SampleId(0, 1)), 0.0).text for each in builders}
    assert texts == {tokenizer.decode(PROMPT, skip_special_tokens=False)}


def test_a_token_of_the_log_probabilities_is_decoded_once(tokenizer: Noting) -> None:
    (builder,) = _builders(tokenizer, logprobs=2)
    found = TokenLogprobs(7000, -1.5, 3, ((7001, -0.5), (7002, -1.0)))
    for _ in range(5):
        update = RequestUpdate(SampleId(0, 1), token_ids=(7000,), logprobs=(found,))
        builder.take(update, 0.0)
    assert [tokenizer.decoded.count((token,)) for token in (7001, 7002)] == [1, 1]
    assert builder.output.logprobs is not None
    assert [each[7001].rank for each in builder.output.logprobs] == [1] * 5
