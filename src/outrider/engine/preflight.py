"""What can be found wrong before a weight is read or a process started."""

from __future__ import annotations

from typing import NamedTuple

from outrider.config import EngineConfig
from outrider.engine.tokenizers import engine_tokenizer
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.loader import load_spec
from outrider.workers.weights.tokenizer import Tokenizer


class Models(NamedTuple):
    """The checkpoints a configuration names, as far as they are known without their weights."""

    target: ModelSpec
    draft: ModelSpec | None
    tokenizer: Tokenizer | None


def check_models(config: EngineConfig) -> Models:
    """Both checkpoints exist, split over as many ranks as asked, and share a tokenizer."""
    target = load_spec(config.target.model, revision=config.target.revision)
    draft = load_spec(config.draft.model) if config.draft.model is not None else None
    Partition.of(target, Shard(0, config.target.tensor_parallel))
    if draft is not None:
        Partition.of(draft, Shard(0, config.draft.tensor_parallel))
    draft_vocab_size = None if draft is None else draft.vocab_size
    return Models(target, draft, engine_tokenizer(config, target.vocab_size, draft_vocab_size))
