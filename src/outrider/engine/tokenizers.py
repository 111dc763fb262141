"""The tokenizer of an engine, once it is known that target and draft mean the same by a token."""

from __future__ import annotations

import logging

from outrider.config import EngineConfig
from outrider.errors import ModelError
from outrider.workers.weights.tokenizer import Tokenizer, check_same_tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def engine_tokenizer(
    config: EngineConfig, target_vocab_size: int, draft_vocab_size: int | None
) -> Tokenizer | None:
    """The target's tokenizer; None if the checkpoint has none, and prompts must be token ids."""
    tokenizer = _load(config.target.model, config.target.revision)
    if config.draft.model is None or draft_vocab_size is None:
        return tokenizer
    other = _load(config.draft.model, None)
    if tokenizer is not None and other is not None:
        check_same_tokenizer(
            tokenizer,
            other,
            target_vocab_size=target_vocab_size,
            draft_vocab_size=draft_vocab_size,
        )
    elif target_vocab_size != draft_vocab_size:
        raise ModelError(
            f"the draft's vocabulary has {draft_vocab_size} tokens and the target's "
            f"{target_vocab_size}; use a draft of the same family."
        )
    return tokenizer


def _load(source: str, revision: str | None) -> Tokenizer | None:
    try:
        return load_tokenizer(source, revision=revision)
    except ModelError as error:
        logger.warning("%s Prompts must be token ids.", error)
        return None
