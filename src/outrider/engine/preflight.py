"""Settles and checks the models before a weight is read or a process started."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import NamedTuple

from outrider.checkpoints.files import Files
from outrider.checkpoints.resolve import at_commit, commit_of_source
from outrider.config import EngineConfig
from outrider.config.bundled import AUTO
from outrider.errors import ModelError
from outrider.progress_stages import stage
from outrider.text.tokenizer import (
    Tokenizer,
    check_fits_model,
    check_same_tokenizer,
    load_tokenizer,
)
from outrider.workers.heads.formats import kind_of, load_head_spec
from outrider.workers.heads.spec import HeadSpec
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.checkpoint import check_files, load_spec

logger = logging.getLogger(__name__)


class CheckedModels(NamedTuple):
    """What is known of a configuration's checkpoints without their weights."""

    config: EngineConfig  # with revisions resolved to commits
    target: ModelSpec
    draft: ModelSpec | None
    head: HeadSpec | None
    tokenizer: Tokenizer | None


def check_models(
    config: EngineConfig, *, has_weights: bool = True, has_text: bool = True
) -> CheckedModels:
    """Check that both checkpoints are complete, can be split over their ranks, and share a
    tokenizer that fits their vocabularies.

    Without `has_weights`, weights are neither read nor downloaded: all ranks may be on other hosts.
    Without `has_text`, tokenizers are not loaded, which takes as long as loading a small model; a
    server has already checked them.
    """
    config = settle_head(settle_revisions(config))
    files = Files.ALL if has_weights else Files.TEXT
    sources = [(config.target.model, config.target.revision)]
    if config.draft.model is not None:
        sources.append((config.draft.model, config.draft.revision))
    specs = [load_spec(model, revision=revision, needed=files) for model, revision in sources]
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
        head = load_head_spec(config.head.model, target, revision=own.revision, needed=files)
    tokenizer = None
    if has_text:
        with stage("loading the tokenizers"):
            tokenizer = engine_tokenizer(config, target.vocab_size, draft_vocab_size)
    return CheckedModels(config, target, draft, head, tokenizer)


def engine_tokenizer(
    config: EngineConfig, target_vocab_size: int, draft_vocab_size: int | None
) -> Tokenizer | None:
    """The target's tokenizer, which the draft must share; None if there is none."""
    target = config.target
    if target.tokenizer is not None:  # set explicitly, so failing to load it is an error
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


def settle_revisions(config: EngineConfig) -> EngineConfig:
    """The configuration with branches and tags resolved to commits, so that every process on every
    host loads the same models. Asks the hub nothing if all revisions are commits."""
    target, draft = config.target, config.draft
    target = dataclasses.replace(target, revision=_settled(target.model, target.revision))
    if target.tokenizer is not None:
        tokenizer = at_commit(target.tokenizer, commit_of_source(target.tokenizer, None))
        target = dataclasses.replace(target, tokenizer=tokenizer)
    if draft.model is not None:
        draft = dataclasses.replace(draft, revision=_settled(draft.model, draft.revision))
    head = config.head
    if head.model is not None:
        head = dataclasses.replace(head, revision=_settled(head.model, head.revision))
    return dataclasses.replace(config, target=target, draft=draft, head=head)


def settle_head(config: EngineConfig, *, may_ask: bool = True) -> EngineConfig:
    """If the draft model is a head, move it to the configuration's head, with its kind. Without
    `may_ask`, only files on this host are read, not the hub."""
    draft, head = config.draft, config.head
    model, revision = head.model or draft.model, head.revision or draft.revision
    if model is None or head.method != AUTO or not (may_ask or Path(model).exists()):
        return config
    kind = kind_of(model, revision=revision, by_tensors=head.model is not None)
    if kind is None and head.model is None:
        return config
    if kind is None:
        raise ModelError(f"head.model is {model!r}, which is no head; name it as draft.model.")
    draft = dataclasses.replace(draft, model=None, revision=None, tensor_parallel=1)
    head = dataclasses.replace(head, model=model, revision=revision, method=kind.value)
    return dataclasses.replace(config, draft=draft, head=head)


def _settled(model: str, revision: str | None) -> str | None:
    return commit_of_source(model, revision) or revision
