"""A self-contained tokenizer.json, loaded without `transformers`.

Importing `transformers` takes longer than the rest of a gateway's start. `read_plain` returns None
for folders that need more than is implemented here, and `transformers` loads those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checkpoints.files import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
# Fields of tokenizer_config.json that change ids, text or templates in ways not implemented here.
_LEFT_TO_TRANSFORMERS = (
    *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "init_inputs"),
    *("split_special_tokens", "fix_mistral_regex", "fast_tokenizer_files"),
    *("model_specific_special_tokens", "post_processor", "tokenizer_truncation"),
    *("tokenizer_padding", "tokenizer_object"),
)
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class PlainTokenizer:
    """The subset of `transformers.PreTrainedTokenizerFast` used here, with the same results.

    Thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        further_special_tokens: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> None:
        self.folder = folder
        self.name_or_path = str(folder)
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self._all_special = [*dict.fromkeys((*special_tokens.values(), *further_special_tokens))]

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> list[int]:
        """`verbose` is for `transformers`; this one never logs."""
        # As a batch, which releases the GIL.
        [found] = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )
        return text

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def get_chat_template(self) -> str | None:
        return self.chat_template

    @property
    def all_special_ids(self) -> list[int]:
        vocab = self.get_vocab()
        return [vocab[token] for token in self._all_special]

    @property
    def bos_token_id(self) -> int | None:
        token = self.special_tokens_map.get("bos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def is_self_contained(folder: Path) -> bool:
    """Whether tokenizer.json alone defines the tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return False
    config = folder / "tokenizer_config.json"
    return not config.is_file() or read_json(config).get("tokenizer_class") in GENERIC_CLASSES


def read_plain(folder: Path) -> PlainTokenizer | None:
    """None if `transformers` must load it, or report what is wrong with it."""
    if not is_self_contained(folder) or _has_further_files(folder):
        return None
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    if "added_tokens_decoder" not in config and (folder / "special_tokens_map.json").exists():
        return None
    template = _template(folder, config)
    if any(config.get(name) for name in _LEFT_TO_TRANSFORMERS) or not isinstance(
        template, str | None
    ):
        return None
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises plain `Exception`
        return None
    named, further = _named_tokens(config), _further_tokens(config)
    if named is None or further is None or not _is_settled(backend, config, {*named.values()}):
        return None
    if not {*further} <= {token.content for token in _added(backend).values()}:
        return None
    return PlainTokenizer(folder, backend, named, further, template)


def _has_further_files(folder: Path) -> bool:
    return any(
        (folder / name).exists() for name in ("added_tokens.json", "additional_chat_templates")
    )


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str] | None:
    """None if one is not text, or if there are model-specific ones, which templates would see
    too."""
    found = {name: _text_of(config.get(name)) for name in NAMED_TOKENS if config.get(name)}
    own = (name for name in config if name.endswith("_token") and name not in NAMED_TOKENS)
    if None in found.values() or any(not isinstance(config[name], bool) for name in own):
        return None
    return {name: text for name, text in found.items() if text is not None}


def _further_tokens(config: Mapping[str, Any]) -> list[str] | None:
    given = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    found = [_text_of(each) for each in given] if isinstance(given, list) else [None]
    texts = [text for text in found if text is not None]
    return texts if len(texts) == len(found) else None


def _text_of(token: Any) -> str | None:
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token.get("content")
    return token if isinstance(token, str) else None


def _is_settled(backend: Tokenizer, config: Mapping[str, Any], named: set[str]) -> bool:
    """Whether the configuration adds nothing to tokenizer.json and changes no decoded text."""
    added = _added(backend)
    if backend.truncation is not None or backend.padding is not None:
        return False
    if config.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        return False
    if not named <= {token.content for token in added.values() if token.special}:
        return False
    listed: Mapping[str, Any] = config.get("added_tokens_decoder", {})
    return all(
        int(index) in added
        and isinstance(token, dict)
        and all(token.get(flag) == getattr(added[int(index)], flag) for flag in _FLAGS)
        for index, token in listed.items()
    )


def _added(backend: Tokenizer) -> dict[int, AddedToken]:
    found: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    return found
