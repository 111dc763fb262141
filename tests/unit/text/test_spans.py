"""Which characters of a text were drafted."""

from __future__ import annotations

from typing import Any

from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import OutputDelta
from outrider.text.spans import Span, TextSpans


class FakeTokenizer:
    """Token 65 is "A" and so on; tokens from 1000 on are bytes of no finished character."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) if token < 1000 else "\ufffd" for token in ids)


def _spans() -> TextSpans:
    return TextSpans(Detokenizer(FakeTokenizer(), ()))


def _delta(text: str, token_ids: tuple[int, ...], num_accepted: int) -> OutputDelta:
    output: Any = None
    return OutputDelta("r", 0, text, token_ids, num_accepted, None, output)


def test_accepted_drafts_come_before_the_targets_own_token() -> None:
    assert _spans().take(_delta("ABC", (65, 66, 67), 2)) == [Span(2, True), Span(1, False)]


def test_characters_held_back_keep_the_origin_of_their_token() -> None:
    spans = _spans()
    assert spans.take(_delta("A", (65, 66, 67), 2)) == [Span(1, True)]
    assert spans.take(_delta("BCD", (68,), 0)) == [Span(1, True), Span(2, False)]


def test_a_span_may_be_cut_in_the_middle() -> None:
    spans = _spans()
    assert spans.take(_delta("", (65, 66), 2)) == []
    assert spans.take(_delta("A", (), 0)) == [Span(1, True)]
    assert spans.take(_delta("B", (), 0)) == [Span(1, True)]


def test_text_of_no_token_is_nobodys_draft() -> None:
    assert _spans().take(_delta("\ufffd", (1000,), 1)) == [Span(1, False)]


def test_an_echoed_prompt_is_nobodys_draft() -> None:
    spans = _spans()
    assert sum(span.num_chars for span in spans.take(_delta("prompt: A", (65,), 0))) == 9
