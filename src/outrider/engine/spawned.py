"""An engine in this process whose models run in child processes."""

from __future__ import annotations

import logging

from outrider.config import EngineConfig
from outrider.engine.built import BuiltEngine
from outrider.engine.doorway import Doorway
from outrider.engine.rank_group import RankError
from outrider.engine.remote_build import RemoteEngine, group_sizes
from outrider.engine.spawn import SpawnedRanks
from outrider.engine.tokenizers import engine_tokenizer
from outrider.workers.links.messages import DRAFT
from outrider.workers.weights.loader import load_spec

logger = logging.getLogger(__name__)


def build_spawned(config: EngineConfig) -> BuiltEngine:
    """Check what can be checked here, start the ranks, and wait until they are ready."""
    target = load_spec(config.target.model, revision=config.target.revision)
    draft = load_spec(config.draft.model) if config.draft.model is not None else None
    tokenizer = engine_tokenizer(
        config, target.vocab_size, None if draft is None else draft.vocab_size
    )
    ranks = SpawnedRanks(group_sizes(config), config.target.device)
    doorway = Doorway([ranks.address], ranks.secret, group_sizes(config))
    ranks.start()
    try:
        engine = RemoteEngine(
            config,
            doorway,
            report=logger.info,
            on_draft_lost=lambda _: ranks.kill(DRAFT),
            raise_if_dead=ranks.raise_if_dead,
        )
    except BaseException as error:
        doorway.close()
        try:
            if isinstance(error, RankError):
                ranks.raise_if_dead(error)
            raise
        finally:
            ranks.close()

    ranks.restart_drafts()

    def close() -> None:
        engine.close()
        ranks.close()

    return BuiltEngine(config, engine.loop, tokenizer, target, draft, engine.facts, close)
