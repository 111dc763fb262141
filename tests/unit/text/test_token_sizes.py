"""The least number of tokens of a text is never above the true one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from outrider.checkpoints.resolve import BUNDLED_DRAFT
from outrider.errors import RequestError
from outrider.links.gateway_messages import EngineFacts
from outrider.text.input_processor import InputProcessor
from outrider.text.messages import Conversation
from outrider.text.token_sizes import TokenSizes, token_sizes
from outrider.text.tokenizer import load_tokenizer, of_transformers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def _made(model: Any, normalizer: Any = None, splitter: Any = None, **options: Any) -> Any:
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    if options:
        backend.add_special_tokens([AddedToken("<s>", **options)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def _bytes(letters: list[str] = BYTES) -> Any:
    known = [*letters, "aa", "aaaa"]
    merges = [("a", "a"), ("aa", "aa")]
    return models.BPE({letter: i for i, letter in enumerate(known)}, merges)


def _fallback() -> Any:
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "aa"]
    vocabulary = {token: i for i, token in enumerate(known)}
    return models.BPE(vocabulary, [("a", "a")], unk_token="<unk>", byte_fallback=True)


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
BOUNDED: dict[str, Callable[[], Any]] = {
    "the bundled one, which lacks some bytes": lambda: load_tokenizer(BUNDLED_DRAFT),
    "bytes": lambda: _made(_bytes(), splitter=LEVEL),
    "bytes, composed": lambda: _made(_bytes(), normalizers.NFC(), LEVEL),
    "bytes, composed for compatibility": lambda: _made(_bytes(), normalizers.NFKC(), LEVEL),
    "bytes, blanks swallowed": lambda: _made(_bytes(), None, LEVEL, lstrip=True, rstrip=True),
    "fallback to bytes": lambda: _made(_fallback(), normalizers.Replace(" ", "▁")),
    "words joined": lambda: _made(_fallback(), normalizers.Replace("aaaa", "a")),
}


@cache
def _bounded(name: str) -> tuple[Any, TokenSizes | None]:
    tokenizer = BOUNDED[name]()
    return tokenizer, token_sizes(tokenizer)


LETTERS = st.sampled_from(
    [*"a <s>\t\x04\x1d", "\u0301", "é", "ᄀ", "ᅡ", "ᆨ", "ﷺ", "\U000e0001", "🙂"]
)
TEXTS = st.one_of(
    st.text(),
    st.text(LETTERS, max_size=60),
    st.tuples(st.text(LETTERS, max_size=3), st.integers(1, 400)).map(lambda t: t[0] * t[1]),
)


@pytest.mark.parametrize("name", BOUNDED)
@settings(deadline=None, max_examples=150)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_least(name: str, text: str) -> None:
    tokenizer, sizes = _bounded(name)
    assert sizes is not None
    assert sizes.min_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize(
    "tokenizer",
    [
        _made(_bytes(), normalizers.Strip(), LEVEL),
        _made(_bytes(), normalizers.Replace("a", ""), LEVEL),
        _made(_bytes(), None, pre_tokenizers.Whitespace()),
        _made(_bytes(["a"]), None, LEVEL),
        _made(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
        _made(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        object(),
    ],
)
def test_a_tokenizer_that_may_drop_or_join_anything_has_no_bound(tokenizer: Any) -> None:
    assert token_sizes(tokenizer) is None


def _facts(max_model_len: int) -> EngineFacts:
    return EngineFacts({"target.model": BUNDLED_DRAFT}, 49152, (2,), max_model_len, 2, False, "", 8)


class _Unread:
    """Everything of a tokenizer but that it must not be asked for a text's tokens."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> Any:
        assert len(text) < 1000, "it was tokenised"
        return self._inner.encode(text, **options)


def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenised() -> None:
    tokenizer, _ = _bounded("the bundled one, which lacks some bytes")
    door = InputProcessor(_facts(64), _Unread(tokenizer))
    messages = [{"role": "user", "content": "a b " * 5000}]
    with pytest.raises(
        RequestError, match=r"20000 characters, which are at least 247 tokens; .*63"
    ):
        door.prepare("r", "a b " * 5000, params=None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"characters, which are at least 24\d tokens"):
        door.tokenize(Conversation(messages))


def test_a_prompt_that_is_too_long_is_told_to_whoever_asked_and_not_to_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """transformers would warn of it, once a process, in words about its own use."""
    tokenizer = of_transformers(_bounded("the bundled one, which lacks some bytes")[0])
    text = "a b " * (tokenizer.model_max_length // 2 + 1)
    with pytest.raises(RequestError, match=r"your prompt contains 8\d\d\d input tokens"):
        processor = InputProcessor(_facts(tokenizer.model_max_length), tokenizer)
        processor.prepare("r", text, params=None)  # type: ignore[arg-type]
    told = capfd.readouterr()
    assert "sequence length" not in told.out + told.err
    assert not tokenizer.deprecation_warnings


def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning() -> None:
    tokenizer, _ = _bounded("the bundled one, which lacks some bytes")
    door = InputProcessor(_facts(64), _Unread(tokenizer))
    with pytest.raises(RequestError, match="1200 characters, the first 252 of which are 25[0-9]"):
        door.tokenize("2026" * 300)
    fits = "internationalization " * 15  # more than four letters a token
    assert len(fits) > 252
    assert door.tokenize(fits) == tokenizer.encode(fits)
