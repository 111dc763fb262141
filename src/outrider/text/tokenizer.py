"""Loads tokenizers, and checks that two models share one."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from outrider.checkpoints.files import Files, check_size
from outrider.checkpoints.gguf_header import read_gguf_header
from outrider.checkpoints.resolve import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    draft_assets,
    resolve_source,
)
from outrider.errors import ModelError
from outrider.text.plain_tokenizer import PlainTokenizer, is_self_contained, read_plain

logger = logging.getLogger(__name__)

Tokenizer: TypeAlias = Any
"""A `PlainTokenizer`, or a `transformers.PreTrainedTokenizerBase`, which has the same methods and
more; `transformers` is imported only to load one."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# And the files `transformers` reads beside them.
_READ_WHOLE = (
    *(*TOKENIZER_FILES, "tokenizer_config.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)
# Texts that tokenizers with equal vocabularies are known to split differently: digits, whitespace,
# joins.
PROBES = (
    "Hello world, it's 1234567 and  3.14 or ½!",
    "  def f(x):\n\treturn x**2  # done\n\n\n",
    "naïve café — 東京 🙂 ÅÄÖ don't WE'LL",
)


def load_tokenizer(source: str | Path, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a bundled name, folder, `.gguf` file or hub id, with its chat template.
    Downloads no weights.

    Its `name_or_path` is `source`, wherever its files are.
    """
    path = _files_of(source, revision)
    folder = _folder_of(path)
    if folder is not None:
        for name in _READ_WHOLE:
            check_size(folder / name)
        tokenizer = read_plain(folder) or _from_folder(folder)
    else:
        tokenizer = _from_gguf(path)
    tokenizer.name_or_path = str(source)
    return tokenizer


def tokenizer_folder(source: str | Path, revision: str | None = None) -> Path:
    """A folder from which other tools can load the same tokenizer."""
    path = _files_of(source, revision)
    folder = _folder_of(path)
    if folder is None or not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{path} has no tokenizer files beside it ({', '.join(TOKENIZER_FILES)}); name the "
            "folder or hub id of the model it was made from."
        )
    return folder.absolute()


def base_name(source: str) -> str | None:
    """The last component of a model's path; None for a bundled name or a hub id. The path need not
    exist on this host."""
    if source in (BUNDLED_DRAFT, BUNDLED_TARGET):
        return None
    path = Path(source).expanduser()
    if not source.startswith((".", "/", "~")) and not path.exists():
        return None
    return path.name or path.resolve().name or None


def _files_of(source: str | Path, revision: str | None) -> Path:
    # The one rebuilt from the bundled GGUF splits digits differently from the original.
    if source == BUNDLED_TARGET:
        return draft_assets()
    return resolve_source(source, revision, Files.TEXT)


def _folder_of(path: Path) -> Path | None:
    """None if the tokenizer is in the file itself."""
    if path.is_dir():
        return path
    is_beside = any((path.parent / name).is_file() for name in TOKENIZER_FILES)
    return path.parent if is_beside else None


@lru_cache(maxsize=4)
def of_transformers(tokenizer: PlainTokenizer) -> Tokenizer:
    """The same tokenizer with the full interface of `transformers`."""
    full = _from_folder(tokenizer.folder)
    full.name_or_path = tokenizer.name_or_path
    return full


def _from_gguf(path: Path) -> Tokenizer:
    logger.warning(
        "%s has no tokenizer beside it; one is rebuilt from the file and may split text "
        "differently from the original",
        path.name,
    )
    read_gguf_header(path)
    return _pretrained(path.parent, gguf_file=path.name)


@lru_cache(maxsize=2**16)
def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token. Cached: log-probabilities need the same few tokens in every step."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return text


def check_fits_model(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise unless the model knows every token the tokenizer can write."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise ModelError(
            f"the tokenizer has ids up to {largest} but the model's vocabulary has {vocab_size} "
            "tokens; put the tokenizer.json that belongs to the model beside its weights."
        )


def check_same_tokenizer(
    target: Tokenizer,
    draft: Tokenizer,
    *,
    target_vocab_size: int | None = None,
    draft_vocab_size: int | None = None,
) -> None:
    """Raise unless every token means the same to both and neither can meet an unknown one.

    The vocabulary sizes are those of the models, which may be padded beyond the tokenizer's.
    """
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    for token, token_id in target_ids.items():
        other = draft_ids.get(token)
        if other is not None and other != token_id:
            raise ModelError(
                f"the draft's tokenizer differs from the target's: token {token!r} is {other} "
                f"for the draft and {token_id} for the target; use a draft of the same family."
            )
    taken = {token_id: token for token, token_id in draft_ids.items()}
    for token, token_id in target_ids.items():
        if taken.get(token_id, token) != token:
            raise ModelError(
                f"the draft's tokenizer differs from the target's: id {token_id} is "
                f"{taken[token_id]!r} for the draft and {token!r} for the target; use a draft of "
                "the same family."
            )
    _check_fits("draft", draft_vocab_size or max(draft_ids.values()) + 1, "target", target_ids)
    _check_fits("target", target_vocab_size or max(target_ids.values()) + 1, "draft", draft_ids)
    for text in PROBES:
        if _encode(target, text) != _encode(draft, text):
            raise ModelError(
                f"the draft's tokenizer splits {text!r} differently from the target's; "
                "use a draft of the same family."
            )


def _check_fits(model: str, vocab_size: int, other: str, ids: dict[str, int]) -> None:
    largest = max(ids.values())
    if largest >= vocab_size:
        raise ModelError(
            f"the {other}'s tokenizer has ids up to {largest} but the {model}'s vocabulary has "
            f"{vocab_size}; use a draft with the target's tokenizer."
        )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _from_folder(folder: Path) -> Tokenizer:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); "
            "copy the original model's tokenizer.json and tokenizer_config.json into it."
        )
    return _pretrained(folder)


def _pretrained(folder: Path, **options: Any) -> Tokenizer:
    import transformers

    is_generic = not options and is_self_contained(folder)  # to find another class takes seconds
    kind: Any = getattr(transformers, "PreTrainedTokenizerFast" if is_generic else "AutoTokenizer")
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **options)
    # Damaged files raise whatever the parser fails on.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded ({reason}); "
            "put the original model's tokenizer.json beside the weights."
        ) from None
