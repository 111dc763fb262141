"""A tokenizer is loaded while its engine is on its way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.config import EngineConfig
from outrider.errors import ModelError
from outrider.gateway import served_model
from outrider.gateway.served_model import Tokenizers


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were loaded, in order; "nowhere" cannot be."""
    sources: list[str] = []

    def load(source: str, *, revision: str | None) -> str:
        if source == "nowhere":
            raise ModelError("there is none.")
        sources.append(source)
        return f"{source} {len(sources)}"

    monkeypatch.setattr(served_model, "load_tokenizer", load)
    return sources


@pytest.fixture
def tokenizers() -> Iterator[Tokenizers]:
    made = Tokenizers()
    yield made
    made.close()


def _config(model: str) -> EngineConfig:
    return EngineConfig.from_settings({"target.model": model})


def test_the_one_that_is_expected_is_loaded_ahead_and_used_once(
    loaded: list[str], tokenizers: Tokenizers
) -> None:
    tokenizers.expect(_config("a"))
    assert tokenizers.load(_config("a")) == "a 1"
    assert tokenizers.load(_config("a")) == "a 2", "its files may be others by now"


def test_an_engine_with_another_model_gets_its_own(
    loaded: list[str], tokenizers: Tokenizers
) -> None:
    tokenizers.expect(_config("a"))
    assert str(tokenizers.load(_config("b"))).startswith("b ")


@pytest.mark.usefixtures("loaded")
def test_one_that_cannot_be_loaded_is_told_and_done_without(
    tokenizers: Tokenizers, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizers.expect(_config("nowhere"))
    assert tokenizers.load(_config("nowhere")) is None
    assert "Prompts must be token ids" in caplog.text
