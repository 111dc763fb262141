"""Text comes out token by token, whole characters only, and ends where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.checkpoints.resolve import BUNDLED_DRAFT
from outrider.text.detokenize import Detokenizer, StopStrings
from outrider.text.stop_automaton import StopAutomaton
from outrider.text.tokenizer import load_tokenizer

TEXTS = [
    "Plain words, a comma and 1234 digits.",
    "naïve café: ÅÄÖ, Straße, Ελληνικά, русский",
    "東京は日本の首都です。",
    "🙂 thumbs 👍🏽, a family 👨‍👩‍👧‍👦 and a flag 🇫🇷",
    "  leading blanks\n\n\tand a tab  \n",
    "def f(x):\n    return x ** 2  # done\n",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED_DRAFT)


class Words:
    """A tokenizer in the manner of sentencepiece: a space belongs to the word behind it, and the
    first word of a text loses it."""

    vocabulary = ["▁one", "▁two", "three", "▁", "</s>"]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i == 4)]
        return "".join(self.vocabulary[i] for i in kept).replace("▁", " ").removeprefix(" ")


def _pieces(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_together_are_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(_pieces(tokenizer, [], ids)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_behind_a_prompt_are_what_the_whole_adds(tokenizer: Any, text: str) -> None:
    prompt = tokenizer.encode("Say it again, exactly:", add_special_tokens=False)
    ids = tokenizer.encode(" " + text, add_special_tokens=False)
    whole = tokenizer.decode(prompt + ids)
    assert tokenizer.decode(prompt) + "".join(_pieces(tokenizer, prompt, ids)) == whole


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all("\ufffd" not in piece for piece in _pieces(tokenizer, [], ids))


def test_a_character_of_several_tokens_comes_with_its_last(tokenizer: Any) -> None:
    ids = tokenizer.encode("🦜", add_special_tokens=False)
    assert len(ids) > 1, "the character must take several tokens for this test to mean something"
    assert _pieces(tokenizer, [], ids) == [*[""] * (len(ids) - 1), "🦜", ""]


def test_an_unfinished_character_is_shown_when_no_token_follows(tokenizer: Any) -> None:
    ids = tokenizer.encode("🦜", add_special_tokens=False)[:-1]
    pieces = _pieces(tokenizer, [], ids)
    assert "".join(pieces[:-1]) == "" and pieces[-1] == tokenizer.decode(ids)


def test_flushing_twice_adds_nothing(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    detokenizer.push(tokenizer.encode("🦜", add_special_tokens=False)[0])
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_a_word_behind_the_prompt_keeps_its_space() -> None:
    assert _pieces(Words(), [0], [1, 2, 3, 0]) == [" two", "three", " ", " one", ""]


def test_the_first_word_of_a_text_has_no_space() -> None:
    assert _pieces(Words(), [], [0, 1]) == ["one", " two", ""]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    assert _pieces(Words(), [0], [4, 1]) == ["", " two", ""]
    kept = Detokenizer(Words(), [0], skip_special_tokens=False)
    assert [kept.push(4), kept.push(1)] == ["</s>", " two"]


class Naive:
    """The rule, in its plainest form: decode everything that is not shown yet with every token."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._ids, self._context = list(prompt[-6:]), 0
        self._read = len(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def rest(self) -> str:
        known = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context :])[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))


# Special tokens, words, and bytes that are parts of characters.
_IDS = st.sampled_from([0, 1, 2, 17, 504, 1000, 20000, 140, 141, 142, 190, 218, 236, 241, 250])


@settings(deadline=None, max_examples=300)
@given(prompt=st.lists(_IDS, max_size=9), ids=st.lists(_IDS, max_size=30), skip=st.booleans())
def test_runs_of_special_tokens_and_broken_bytes_change_no_piece(
    tokenizer: Any, prompt: list[int], ids: list[int], skip: bool
) -> None:
    ours, naive = Detokenizer(tokenizer, prompt, skip), Naive(tokenizer, prompt, skip)
    assert [ours.push(token) for token in ids] == [naive.push(token) for token in ids]
    assert ours.flush() == naive.rest()


@settings(deadline=None, max_examples=60)
@given(
    part=st.lists(_IDS, min_size=1, max_size=4),
    count=st.integers(1, 60),
    ids=st.lists(_IDS, max_size=5),
)
def test_a_long_run_of_the_same_comes_to_the_same_text(
    tokenizer: Any, part: list[int], count: int, ids: list[int]
) -> None:
    naive = Naive(tokenizer, ids, True)
    run = [*ids, *part * count, *ids]
    expected = "".join(map(naive.push, run)) + naive.rest()
    assert "".join(_pieces(tokenizer, ids, run)) == expected


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_tokens = inner, 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_tokens += len(ids)
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("token", [2, 142])
def test_the_work_for_a_run_that_shows_nothing_grows_with_its_length_only(
    tokenizer: Any, token: int
) -> None:
    counting = Counting(tokenizer)
    _pieces(counting, [504], [token] * 2000)
    assert counting.num_tokens < 2000 * 150


# -- stop strings ------------------------------------------------------------------------------


def _shown(stops: Sequence[str], pieces: Sequence[str], include: bool = False) -> tuple[str, str]:
    """The text a reader sees, and the stop string that ended it ("" for none)."""
    finder = StopStrings(StopAutomaton(stops), include)
    text = ""
    for piece in pieces:
        safe, stop = finder.push(piece)
        text += safe
        if stop is not None:
            return text, stop
    return text + finder.flush(), ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopStrings(StopAutomaton(()), include=False).push("anything") == ("anything", None)


def test_a_stop_string_over_several_tokens_is_found() -> None:
    assert _shown(["END"], ["a E", "N", "D b"]) == ("a ", "END")


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete() -> None:
    finder = StopStrings(StopAutomaton(["END"]), include=False)
    assert [finder.push(piece) for piece in ("a", "E", "N")] == [
        ("a", None),
        ("", None),
        ("", None),
    ]


def test_nothing_behind_a_stop_string_leaks() -> None:
    finder = StopStrings(StopAutomaton(["END"]), include=False)
    assert finder.push("aENDsecret") == ("a", "END")
    assert finder.flush() == ""


def test_a_false_start_is_released_as_soon_as_it_is_one() -> None:
    finder = StopStrings(StopAutomaton(["END"]), include=False)
    finder.push("aEN")
    assert finder.push("x") == ("ENx", None)


def test_a_start_inside_a_false_start_is_still_held() -> None:
    finder = StopStrings(StopAutomaton(["aab"]), include=False)
    assert finder.push("aa") == ("", None)
    assert finder.push("a") == ("a", None)
    assert finder.push("b") == ("", "aab")


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert _shown(["later", "soon"], ["x soon later"]) == ("x ", "soon")


def test_of_overlapping_stop_strings_the_one_complete_first_wins() -> None:
    assert _shown(["abcd", "bc"], list("xabcd")) == ("xa", "bc")


def test_the_stop_string_is_shown_if_included() -> None:
    assert _shown(["END"], ["a E", "ND b"], include=True) == ("a END", "END")


def test_held_text_is_shown_when_the_tokens_end() -> None:
    assert _shown(["END"], ["a EN"]) == ("a EN", "")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_how_the_text_is_cut_into_tokens_does_not_matter(size: int) -> None:
    text = "one two### three ##. four ###five"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert _shown(["###f", "##."], pieces) == ("one two### three ", "##.")


def _naive(stops: Sequence[str], held: str, piece: str, include: bool) -> tuple[str, str, str]:
    """What is shown, what is held and the stop string ("" for none), each looked for alone."""
    text = held + piece
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        at, stop = min(found)
        return text[: at + len(stop) if include else at], "", stop
    for size in range(len(text), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return text[:-size], text[-size:], ""
    return text, "", ""


_LETTERS = st.text("abc", min_size=1, max_size=6)


@settings(deadline=None, max_examples=1000)
@given(
    stops=st.lists(_LETTERS, min_size=1, max_size=6),
    pieces=st.lists(st.text("abc", max_size=8), max_size=12),
    include=st.booleans(),
)
def test_all_stop_strings_at_once_are_found_as_each_for_itself(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    finder, held = StopStrings(StopAutomaton(stops), include), ""
    for piece in pieces:
        shown, held, stop = _naive(stops, held, piece, include)
        assert finder.push(piece) == (shown, stop or None)
        if stop:
            held = ""
            break
    assert finder.flush() == held


class _Steps(StopAutomaton):
    """Counts how often a state is looked at."""

    count = 0

    def _child(self, state: int, letter: str) -> int | None:
        self.count += 1
        return super()._child(state, letter)


def test_the_work_for_a_text_does_not_grow_with_the_number_of_stop_strings() -> None:
    stops = _Steps([f"{'ab' * 50}{number:05}" for number in range(5000)])
    stops.count = 0
    finder = StopStrings(stops, include=False)
    for _ in range(500):
        finder.push("ab" * 20)
    assert stops.count <= 2 * 500 * 40
