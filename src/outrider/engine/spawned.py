"""An engine in this process whose models run in child processes."""

from __future__ import annotations

import logging

from outrider.config import EngineConfig
from outrider.engine.built import BuiltEngine
from outrider.engine.doorway import Doorway
from outrider.engine.launch.ranks import SpawnedRanks
from outrider.engine.over_ranks import RemoteEngine, group_sizes
from outrider.engine.preflight import check_models
from outrider.engine.rank_group import RankError
from outrider.links.rank_messages import DRAFT

logger = logging.getLogger(__name__)


def build_spawned(config: EngineConfig) -> BuiltEngine:
    """Check what can be checked here, start the ranks, and wait until they are ready."""
    target, draft, tokenizer = check_models(config)
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

    return BuiltEngine(
        config, engine.loop, tokenizer, target, draft, engine.facts, close, engine.status
    )
