"""What is read without `transformers` is what `transformers` reads; all else is left to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import VOCAB_SIZE
from distill_tools import save_toy_tokenizer
from letters import letter_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET, draft_assets
from outrider.text.detokenize import Detokenizer
from outrider.text.plain_tokenizer import PlainTokenizer, read_plain
from outrider.text.tokenizer import load_tokenizer, of_transformers

TEXTS = (
    "",
    " ",
    "Plain words, a comma , and 1234567 digits . Don't !",
    "naïve café: ÅÄÖ, Straße, Ελληνικά, русский, 東京は日本の首都です。",
    "🙂 thumbs 👍🏽, a family 👨‍👩‍👧‍👦 and a flag 🇫🇷",
    "  leading blanks\n\n\tand a tab  \r\n",
    "<|im_start|>user\nHello <|im_end|> <s>x</s>  <unk> <tool> <|endoftext|>",
    "<s> a </s><s>b</s> [MASK] ▁lower",
)
Make = Callable[[Path], Any]


def _copy(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(draft_assets() / name, folder)


def _saved(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(str(folder))


def _sentence_pieces() -> Tokenizer:
    """In the manner of Llama 2: blanks as letters, bytes for what is unknown, a first token."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "th"]
    made = Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("t", "h")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def _word_pieces() -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "don", "'", "t", "a", "##b", ",", ".", "!", "words"]
    made = Tokenizer(models.WordPiece({p: at for at, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def _llama_2(folder: Path) -> None:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=_sentence_pieces(), **names)
    made.add_tokens(["<tool>"])
    made.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    _saved(made, folder)


def _added_tokens_listed(folder: Path) -> None:
    """As Llama 3 comes: tokenizer_config.json repeats them, special_tokens_map.json is beside."""
    _copy(folder)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    listed = {str(token.pop("id")): token for token in added}
    _edit(folder, added_tokens_decoder=listed, additional_special_tokens=["<file_sep>"])
    (folder / "special_tokens_map.json").write_text('{"bos_token": "another"}')


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _template_file(folder: Path) -> None:
    _copy(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}é\n")


def _without_configuration(folder: Path) -> None:
    shutil.copy(draft_assets() / "tokenizer.json", folder)


def _cleaned(folder: Path) -> None:
    _copy(folder)
    _edit(folder, clean_up_tokenization_spaces=True)  # which does nothing to BPE


def _add_bos(folder: Path) -> None:
    _copy(folder)
    _edit(folder, add_bos_token=True, add_eos_token=True)  # tokenizer.json says otherwise


PLAIN: dict[str, Make] = {
    "the bundled one": _copy,
    "letters": lambda folder: _saved(letter_tokenizer(VOCAB_SIZE), folder),
    "that of trained drafts": save_toy_tokenizer,
    "pieces of sentences, with a first token": _llama_2,
    "added tokens listed twice": _added_tokens_listed,
    "a template in a file": _template_file,
    "no configuration": _without_configuration,
    "blanks to be cleaned up": _cleaned,
    "a first and a last token by configuration": _add_bos,
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_what_is_read_plainly_is_what_transformers_reads(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, PlainTokenizer)
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        _assert_same(ours, kind.from_pretrained(str(tmp_path)))


def _assert_same(ours: PlainTokenizer, theirs: Any) -> None:
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.all_special_ids == theirs.all_special_ids
    for text in TEXTS:
        for is_added in (True, False):
            ids = theirs.encode(text, add_special_tokens=is_added)
            assert ours.encode(text, add_special_tokens=is_added) == ids
            assert (
                ours.encode(text, add_special_tokens=is_added)
                == theirs(text, add_special_tokens=is_added).input_ids
            )
        for is_skipped in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=is_skipped)
            assert ours.decode(ids, skip_special_tokens=is_skipped) == expected
            assert _streamed(ours, ids, is_skipped) == _streamed(theirs, ids, is_skipped)
    every = sorted(ours.get_vocab().values())
    assert [ours.decode([each]) for each in every] == [theirs.decode([each]) for each in every]


def _streamed(tokenizer: Any, ids: list[int], is_skipped: bool) -> list[str]:
    pieces = Detokenizer(tokenizer, ids[:2], is_skipped)
    return [*(pieces.push(token) for token in ids[2:]), pieces.flush()]


def _another_class(folder: Path) -> None:
    _copy(folder)
    _edit(folder, tokenizer_class="GPT2Tokenizer")


def _word_pieces_cleaned(folder: Path) -> None:
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_word_pieces(), clean_up_tokenization_spaces=True
    )
    _saved(made, folder)


def _edited_file(edit: Callable[[Any], None]) -> Make:
    def make(folder: Path) -> None:
        _copy(folder)
        path = folder / "tokenizer.json"
        contents = json.loads(path.read_text())
        edit(contents)
        path.write_text(json.dumps(contents))

    return make


def _configured(**changes: Any) -> Make:
    def make(folder: Path) -> None:
        _copy(folder)
        _edit(folder, **changes)

    return make


def _with_file(name: str, text: str) -> Make:
    def make(folder: Path) -> None:
        _copy(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return make


_LISTED_OTHERWISE = {"content": "<|endoftext|>", "lstrip": True, "special": True}
_TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}

LEFT: dict[str, Make] = {
    "a class of its own": _another_class,
    "blanks that are cleaned up": _word_pieces_cleaned,
    "a special token that is not in the file": _configured(sep_token="<sep>"),
    "a special token that the file has as none": _configured(sep_token="hello"),
    "a special token of this model only": _configured(image_token="<|im_end|>"),
    "named special tokens": _configured(extra_special_tokens={"image_token": "<|im_end|>"}),
    "further special tokens": _configured(additional_special_tokens=["<one more>"]),
    "special tokens as text": _configured(split_special_tokens=True),
    "added tokens listed otherwise": _configured(added_tokens_decoder={"0": _LISTED_OTHERWISE}),
    "several templates": _configured(chat_template=[{"name": "default", "template": "a"}]),
    "templates in a folder": _with_file("additional_chat_templates/rag.jinja", "a"),
    "special tokens beside it": _with_file("special_tokens_map.json", '{"bos_token": "<tool>"}'),
    "added tokens beside it": _with_file("added_tokens.json", '{"<tool>": 49152}'),
    "truncation": _edited_file(lambda file: file.update(truncation=_TRUNCATION)),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_what_asks_for_more_is_left_to_transformers(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    assert read_plain(tmp_path) is None
    read = load_tokenizer(tmp_path)
    assert isinstance(read, transformers.PreTrainedTokenizerBase)
    assert read.encode("hello")


def test_a_gguf_without_a_tokenizer_beside_it_is_not_read_plainly(tmp_path: Path) -> None:
    assert read_plain(tmp_path) is None


def test_whoever_asks_for_more_gets_it_from_transformers() -> None:
    own = load_tokenizer(BUNDLED_TARGET)
    full = of_transformers(own)
    assert isinstance(full, transformers.PreTrainedTokenizerFast)
    assert full.name_or_path == BUNDLED_TARGET
    assert full.get_vocab() == own.get_vocab()


def test_text_of_the_bundled_pair_needs_no_transformers() -> None:
    script = f"""
import sys
from outrider.text.chat import ChatTemplate
from outrider.text.tokenizer import check_same_tokenizer, load_tokenizer
target, draft = load_tokenizer({BUNDLED_TARGET!r}), load_tokenizer({BUNDLED_DRAFT!r})
check_same_tokenizer(target, draft)
text = ChatTemplate(target).render([{{"role": "user", "content": "Hi"}}])
assert draft.decode(target.encode(text)) == text
print(sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
