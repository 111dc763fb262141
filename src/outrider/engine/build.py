"""From a configuration to a running engine: models in this process, or over ranks.

The only factory. It imports torch where models are loaded, not before: an engine over ranks has
no tensors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.config import EngineConfig
from outrider.engine.counters import counters_of
from outrider.engine.doorway import Doorway
from outrider.engine.launch.ranks import Ranks, SpawnedRanks
from outrider.engine.over_ranks import RankModels, group_sizes, start_over_ranks
from outrider.engine.rank_group import Report
from outrider.engine.revisions import settle_head, settle_revisions
from outrider.engine.server_life import ServerLife
from outrider.engine.step import StepLoop
from outrider.errors import ConfigError
from outrider.links.gateway_messages import EngineFacts, EngineStatus
from outrider.links.speculation import SpeculationStatus
from outrider.stages import stage
from outrider.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outrider.workers.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def _nothing() -> None:
    """Nothing stops a build, and models of this process are lost and end with it, unless told."""


def _unchanged(status: EngineStatus) -> EngineStatus:
    return status


def _no_other_draft(config: EngineConfig) -> None:
    raise ConfigError(
        f"draft.model cannot become {config.draft.model!r} where the engine holds its models; "
        "start it anew."
    )


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an engine and what was found out while building it, wherever its models are.

    Tokenizer and models are those read here: ranks of a server read theirs on their own hosts.
    """

    config: EngineConfig  # settled for the target's device
    loop: StepLoop
    facts: EngineFacts
    tokenizer: Tokenizer | None = None
    target: ModelSpec | None = None
    draft: ModelSpec | None = None
    check: Callable[[], None] = _nothing  # when idle: raises if what it cannot do without is lost
    close: Callable[[], None] = _nothing  # ends what was started for it
    name_models: Callable[[EngineStatus], EngineStatus] = _unchanged  # who runs them, and how
    # Have the next draft be the one of another configuration, whoever starts it.
    change_draft: Callable[[EngineConfig], None] = _no_other_draft
    draft_error: Callable[[], str] = str  # why the last one was not taken in

    def status(self, query: int = 0, speculation: SpeculationStatus | None = None) -> EngineStatus:
        return self.name_models(_load_of(self.loop, query, speculation))


def chosen_config(
    owner: str, model: str | None, config: EngineConfig | None, options: Mapping[str, Any]
) -> EngineConfig:
    """What `owner` was given: a whole configuration, or single options by the names of `LLM`."""
    if config is None:
        return EngineConfig.from_kwargs(model=model, **options)
    if model is not None or options:
        raise ConfigError(f"give either config or single options to {owner}, not both.")
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"config is {config!r}; it must be an EngineConfig, as EngineConfig.from_kwargs(...) "
            "gives it."
        )
    return config


def models_of(config: EngineConfig) -> str:
    return " and ".join(filter(None, (config.target.model, config.draft.model)))


def build_engine(config: EngineConfig) -> BuiltEngine:
    """For the program it is part of; models in processes of their own end with that program."""
    return _over_own_ranks(config) if config.has_processes else _inline(config, logger.debug)


def build_served(
    config: EngineConfig,
    doorway: Doorway,
    ranks: Ranks,
    report: Report,
    raise_if_stopped: Callable[[], None] = _nothing,
    server: ServerLife | None = None,
    hold: Callable[[], None] = _nothing,
) -> BuiltEngine:
    """For gateways: with its own models as `cluster.colocate` says, else over ranks, unset too.

    `raise_if_stopped` is asked while ranks are awaited. What earlier engines of the same `server`
    found out about models in their process is not found out again. `hold` is called when all is
    there but the models.
    """
    config = config.for_server()
    if not config.cluster.colocate:
        # Of an engine that was started by hand; those of servers have nothing to ask.
        settled = settle_revisions(config)
        config = settle_head(settled, may_ask=settled != config)
        models = start_over_ranks(config, doorway, ranks, report, raise_if_stopped, hold)
        return _over(models)
    with stage("importing PyTorch"):
        import outrider.engine.inline  # noqa: F401  (takes longest)
        from outrider.workers.device import take_cores

    hold()

    # A launcher may have left fewer threads than there are cores, as Ray does.
    take_cores(config.num_threads, host_share=1, host_index=0)
    return _inline(config, report, server)


def _inline(config: EngineConfig, report: Report, server: ServerLife | None = None) -> BuiltEngine:
    with stage("importing PyTorch"):
        from outrider.engine.inline import load_models

    models = load_models(config, report, server)
    return BuiltEngine(
        models.config,
        models.loop,
        models.facts,
        models.checked.tokenizer,
        models.checked.target,
        models.checked.draft,
        name_models=models.name_models,
    )


def _over_own_ranks(config: EngineConfig) -> BuiltEngine:
    from outrider.engine.preflight import check_models

    config, target, draft, _, tokenizer = check_models(config)
    sizes = group_sizes(config)
    with ExitStack() as opened:  # the last is closed first
        ranks = SpawnedRanks(sizes, config.target.device)
        opened.callback(ranks.close)
        doorway = Doorway([ranks.address], ranks.secret, sizes)
        opened.callback(doorway.close)
        models = start_over_ranks(config, doorway, ranks, logger.info)
        opened.callback(models.close)
        close = opened.pop_all().close
    built = _over(models)
    return dataclasses.replace(built, tokenizer=tokenizer, target=target, draft=draft, close=close)


def _over(models: RankModels) -> BuiltEngine:
    return BuiltEngine(
        models.config,
        models.loop,
        models.facts,
        check=models.check,
        close=models.close,
        name_models=models.name_models,
        change_draft=models.change_draft,
        draft_error=lambda: models.draft_error,
    )


def _load_of(loop: StepLoop, query: int, speculation: SpeculationStatus | None) -> EngineStatus:
    """An answer that names no rank and no model yet."""
    scheduler = loop.scheduler
    stats, pool = scheduler.stats, scheduler.target_pool
    return EngineStatus(
        query=query,
        ranks=(),
        proposal_backend="",
        proposal_sends=0,
        draft_losses=0,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        kv_blocks_used=pool.num_blocks - pool.num_free,
        kv_blocks=pool.num_blocks,
        steps=stats.steps,
        committed_tokens=stats.committed_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        preemptions=scheduler.num_preemptions,
        speculation=speculation,
        counters=counters_of(loop),
    )
