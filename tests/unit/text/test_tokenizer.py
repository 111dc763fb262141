"""Tokenizers: loading, chat templates, and telling two of them apart."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET, draft_assets
from outrider.errors import ModelError
from outrider.text.chat import ChatTemplate
from outrider.text.tokenizer import (
    base_name,
    check_fits_model,
    check_same_tokenizer,
    load_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED_DRAFT)


def edited(folder: Path, edit: Any) -> Any:
    """The bundled tokenizer with `edit` applied to the contents of its tokenizer.json."""
    shutil.copytree(draft_assets(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    contents = json.loads(path.read_text())
    edit(contents)
    path.write_text(json.dumps(contents))
    return load_tokenizer(folder)


def test_text_survives_the_round_trip(tokenizer: Any) -> None:
    text = "Numbers 12345,\n  spaces   and 東京 🙂."
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (BUNDLED_TARGET, None),
        ("owner/name", None),
        ("/models/small-1b", "small-1b"),
        ("/models/small-1b/", "small-1b"),
        ("./small.gguf", "small.gguf"),
        ("~/small", "small"),
        (".", Path.cwd().name),
    ],
)
def test_a_path_has_a_base_name_and_other_sources_have_none(source: str, name: str | None) -> None:
    assert base_name(source) == name


def test_a_relative_path_is_one_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert base_name("models/small") is None, "an id on the hub"
    (tmp_path / "models" / "small").mkdir(parents=True)
    assert base_name("models/small") == "small"


def test_digits_are_split_one_by_one(tokenizer: Any) -> None:
    assert len(tokenizer.encode("12345")) == 5


def test_the_chat_template_brings_its_system_message(tokenizer: Any) -> None:
    text = ChatTemplate(tokenizer).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_bundled_pair_shares_a_tokenizer(tokenizer: Any) -> None:
    target = load_tokenizer(BUNDLED_TARGET)
    check_same_tokenizer(target, tokenizer, target_vocab_size=49152, draft_vocab_size=49152)


def test_a_padded_vocabulary_is_fine(tokenizer: Any) -> None:
    check_same_tokenizer(tokenizer, tokenizer, target_vocab_size=49152, draft_vocab_size=49280)


def test_another_id_for_a_token_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    def swap(contents: Any) -> None:
        vocab = contents["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    with pytest.raises(ModelError, match="draft's tokenizer differs from the target's"):
        check_same_tokenizer(tokenizer, edited(tmp_path / "other", swap))


def test_another_token_for_an_id_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    def rename(contents: Any) -> None:
        added = contents["added_tokens"][5]
        vocab = contents["model"]["vocab"]
        vocab["<renamed>"] = vocab.pop(added["content"])
        added["content"] = "<renamed>"

    with pytest.raises(ModelError, match="'<renamed>' for the draft"):
        check_same_tokenizer(tokenizer, edited(tmp_path / "other", rename))


def test_another_way_to_split_the_same_vocabulary_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    def join_digits(contents: Any) -> None:
        steps = contents["pre_tokenizer"]["pretokenizers"]
        contents["pre_tokenizer"]["pretokenizers"] = [s for s in steps if s["type"] != "Digits"]

    with pytest.raises(ModelError, match="splits .* differently"):
        check_same_tokenizer(tokenizer, edited(tmp_path / "other", join_digits))


def test_a_draft_too_small_for_the_targets_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="up to 49151 but the draft's vocabulary has 49000"):
        check_same_tokenizer(tokenizer, tokenizer, draft_vocab_size=49000)


def test_a_target_too_small_for_the_drafts_tokens_is_refused(tokenizer: Any) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.backend_tokenizer.add_tokens(["<one more>"])
    with pytest.raises(ModelError, match="up to 49152 but the target's vocabulary has 49152"):
        check_same_tokenizer(tokenizer, larger, target_vocab_size=49152, draft_vocab_size=50000)


def test_a_folder_without_a_tokenizer_says_what_to_copy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer.*copy the original"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copy(draft_assets() / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_beside_a_gguf_is_used(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(draft_assets() / name, tmp_path)
    assert load_tokenizer(tmp_path / "model.gguf").get_vocab() == tokenizer.get_vocab()


def test_a_gguf_whose_tokenizer_cannot_be_rebuilt_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    with pytest.raises(ModelError, match=r"put the original model's tokenizer\.json beside"):
        load_tokenizer(tmp_path / "model.gguf")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer: Any) -> None:
    check_fits_model(tokenizer, 49152)
    with pytest.raises(ModelError, match=r"ids up to 49151 but the model's vocabulary has 49151"):
        check_fits_model(tokenizer, 49151)
