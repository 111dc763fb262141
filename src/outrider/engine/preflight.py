"""What can be found wrong before a weight is read or a process started."""

from __future__ import annotations

import logging
from typing import NamedTuple

from outrider.config import EngineConfig
from outrider.errors import ModelError
from outrider.text.tokenizer import (
    Tokenizer,
    check_fits_model,
    check_same_tokenizer,
    load_tokenizer,
)
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.loader import check_files, load_spec

logger = logging.getLogger(__name__)


class Models(NamedTuple):
    """The checkpoints a configuration names, as far as they are known without their weights."""

    target: ModelSpec
    draft: ModelSpec | None
    tokenizer: Tokenizer | None


def check_models(config: EngineConfig) -> Models:
    """Both checkpoints are complete, split over as many ranks as asked, and share a tokenizer that
    is no larger than they are."""
    target = load_spec(config.target.model, revision=config.target.revision)
    draft = load_spec(config.draft.model) if config.draft.model is not None else None
    check_files(config.target.model, revision=config.target.revision)
    if config.draft.model is not None:
        check_files(config.draft.model)
    Partition.of(target, Shard(0, config.target.tensor_parallel))
    if draft is not None:
        Partition.of(draft, Shard(0, config.draft.tensor_parallel))
    draft_vocab_size = None if draft is None else draft.vocab_size
    return Models(target, draft, engine_tokenizer(config, target.vocab_size, draft_vocab_size))


def engine_tokenizer(
    config: EngineConfig, target_vocab_size: int, draft_vocab_size: int | None
) -> Tokenizer | None:
    """The target's tokenizer, which the draft must share; None if there is none."""
    target = config.target
    if target.tokenizer is not None:  # which somebody counts on
        tokenizer = load_tokenizer(target.tokenizer)
    else:
        tokenizer = _load(*target.tokenizer_source)
    if tokenizer is not None:
        check_fits_model(tokenizer, target_vocab_size)
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
