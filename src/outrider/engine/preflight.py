"""What can be found wrong before a weight is read or a process started."""

from __future__ import annotations

import logging
from typing import NamedTuple

from outrider.config import EngineConfig
from outrider.engine.revisions import settle_head, settle_revisions
from outrider.errors import ModelError
from outrider.stages import stage
from outrider.text.tokenizer import (
    Tokenizer,
    check_fits_model,
    check_same_tokenizer,
    load_tokenizer,
)
from outrider.workers.heads.formats import load_head_spec
from outrider.workers.heads.spec import HeadSpec
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.checkpoint import check_files, load_spec
from outrider.workers.weights.files import Files

logger = logging.getLogger(__name__)


class Models(NamedTuple):
    """The checkpoints a configuration names, as far as they are known without their weights."""

    config: EngineConfig  # with the commits they are of
    target: ModelSpec
    draft: ModelSpec | None
    head: HeadSpec | None
    tokenizer: Tokenizer | None


def check_models(
    config: EngineConfig, *, has_weights: bool = True, has_text: bool = True
) -> Models:
    """Both checkpoints are complete, split over as many ranks as asked, and share a tokenizer that
    is no larger than they are.

    Where all ranks may be on other hosts, `has_weights` is false: weights are then neither looked
    at nor downloaded here. An engine of a server that has checked its tokenizers already has no use
    for text: loading them takes as long as loading a small model.
    """
    config = settle_head(settle_revisions(config))
    wanted = Files.ALL if has_weights else Files.TEXT
    sources = [(config.target.model, config.target.revision)]
    if config.draft.model is not None:
        sources.append((config.draft.model, config.draft.revision))
    specs = [load_spec(model, revision=revision, wanted=wanted) for model, revision in sources]
    if has_weights:
        for model, revision in sources:
            check_files(model, revision=revision)
    target, draft = specs[0], specs[1] if len(specs) > 1 else None
    Partition.of(target, Shard(0, config.target.tensor_parallel))
    if draft is not None:
        Partition.of(draft, Shard(0, config.draft.tensor_parallel))
    draft_vocab_size = None if draft is None else draft.vocab_size
    head = None
    if config.head.model is not None:
        own = config.head
        head = load_head_spec(config.head.model, target, revision=own.revision, wanted=wanted)
    tokenizer = None
    if has_text:
        with stage("loading the tokenizers"):
            tokenizer = engine_tokenizer(config, target.vocab_size, draft_vocab_size)
    return Models(config, target, draft, head, tokenizer)


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
    other = _load(config.draft.model, config.draft.revision)
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
