"""Who wrote which characters of a text."""

from __future__ import annotations

from typing import Any

from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import OutputDelta, Round
from outrider.text.spans import Origin, Piece, Span, TextPieces, TextSpans


class FakeTokenizer:
    """Token 65 is "A" and so on; tokens from 1000 on are bytes of no finished character."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) if token < 1000 else "\ufffd" for token in ids)


def _spans() -> TextSpans:
    return TextSpans(Detokenizer(FakeTokenizer(), ()))


def _delta(text: str, token_ids: tuple[int, ...], num_accepted: int) -> OutputDelta:
    output: Any = None
    rounds = (Round(len(token_ids), num_accepted, num_accepted),) if token_ids else ()
    return OutputDelta("r", 0, text, token_ids, rounds, None, output)


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
    spans = TextSpans(Detokenizer(FakeTokenizer(), ()), num_echoed=8)
    assert spans.take(_delta("prompt: AB", (65, 66), 1)) == [
        Span(8, False),
        Span(1, True),
        Span(1, False),
    ]


def _pieces(num_echoed: int = 0) -> TextPieces:
    return TextPieces(Detokenizer(FakeTokenizer(), ()), "draft", num_echoed)


def _rounds(text: str, token_ids: tuple[int, ...], *rounds: Round) -> OutputDelta:
    output: Any = None
    return OutputDelta("r", 0, text, token_ids, rounds, None, output)


def test_a_piece_is_the_text_of_one_token_and_says_whose_it_is() -> None:
    pieces = _pieces()
    taken = pieces.take(_rounds("ABCD", (65, 66, 67, 68), Round(3, 2, 2), Round(1, 0, 0)))
    assert taken == [
        Piece("A", Origin("draft", 0)),
        Piece("B", Origin("draft", 0)),
        Piece("C", Origin("bonus", 0)),
        Piece("D", Origin("target", 1)),
    ]
    assert pieces.take(_rounds("EF", (69, 70), Round(2, 1, 3))) == [
        Piece("E", Origin("draft", 2)),
        Piece("F", Origin("recovered", 2)),
    ]


def test_pieces_held_back_keep_the_round_of_their_token() -> None:
    pieces = _pieces()
    assert pieces.take(_rounds("", (65,), Round(1, 0, 0))) == []
    assert pieces.take(_rounds("AB", (66,), Round(1, 1, 1))) == [
        Piece("A", Origin("target", 0)),
        Piece("B", Origin("draft", 1)),
    ]


def test_pieces_of_an_echoed_prompt_are_from_the_prompt() -> None:
    assert _pieces(num_echoed=3).take(_rounds("abcA", (65,), Round(1, 0, 0))) == [
        Piece("abc", Origin("prompt", -1)),
        Piece("A", Origin("target", 0)),
    ]


def test_what_never_became_a_character_is_of_the_last_round() -> None:
    assert _pieces().take(_rounds("\ufffd", (1000,), Round(1, 0, 2))) == [
        Piece("\ufffd", Origin("recovered", 0))
    ]
