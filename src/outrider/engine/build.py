"""Builds a running engine from a configuration: models in this process, or over ranks.

The only factory. It imports torch only where models are loaded: an engine over ranks has no
tensors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.config import EngineConfig
from outrider.engine.launch.ranks import RankLauncher, SpawnedRanks
from outrider.engine.over_ranks import RankModels, group_sizes, start_over_ranks
from outrider.engine.preflight import check_models, settle_head, settle_revisions
from outrider.engine.rank_group import Report
from outrider.engine.step import StepLoop
from outrider.errors import ConfigError
from outrider.links.gateway_messages import (
    EngineCounters,
    EngineFacts,
    EngineStatus,
    ProposerCounters,
)
from outrider.links.listener import Listener
from outrider.links.speculation import SpeculationStatus
from outrider.progress_stages import stage
from outrider.scheduler.outcomes import SchedulerStats
from outrider.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outrider.workers.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def _nothing() -> None:
    """The default hook: does nothing."""


def _unchanged(status: EngineStatus) -> EngineStatus:
    return status


def _no_other_draft(config: EngineConfig) -> None:
    raise ConfigError(
        f"draft.model cannot become {config.draft.model!r} where the engine holds its models; "
        "restart it."
    )


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an engine and its facts, wherever its models are.

    Tokenizer and models are those loaded here: ranks of a server load theirs on their own hosts.
    """

    config: EngineConfig  # settled for the target's device
    loop: StepLoop
    facts: EngineFacts
    tokenizer: Tokenizer | None = None
    target: ModelSpec | None = None
    draft: ModelSpec | None = None
    check: Callable[[], None] = _nothing  # while idle: raises if the target is lost
    close: Callable[[], None] = _nothing  # ends the processes started for it
    name_models: Callable[[EngineStatus], EngineStatus] = _unchanged  # adds ranks and models
    # The next draft to join is the one of another configuration.
    change_draft: Callable[[EngineConfig], None] = _no_other_draft
    draft_error: Callable[[], str] = str  # why the last draft was rejected

    def status(self, query: int = 0, speculation: SpeculationStatus | None = None) -> EngineStatus:
        return self.name_models(_load_of(self.loop, query, speculation))


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What an engine knows about its server. Shared by successive engines of a server: what an
    earlier one measured and cached is reused."""

    secret: str
    is_checked: bool  # the parent process has compared the models' tokenizers


def chosen_config(
    owner: str, model: str | None, config: EngineConfig | None, options: Mapping[str, Any]
) -> EngineConfig:
    """The configuration passed to `owner`: an `EngineConfig`, or options by the names of `LLM`."""
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
    """An engine inside a program; models in other processes end with that program."""
    return _over_own_ranks(config) if config.has_processes else _inline(config, logger.debug)


def build_served(
    config: EngineConfig,
    listener: Listener,
    ranks: RankLauncher,
    report: Report,
    raise_if_stopped: Callable[[], None] = _nothing,
    server: ServerContext | None = None,
    hold: Callable[[], None] = _nothing,
) -> BuiltEngine:
    """An engine for gateways: colocated if `cluster.colocate` is true, else over ranks.

    `raise_if_stopped` is polled while waiting for ranks. Results that earlier engines of the same
    `server` cached are reused. `hold` is called when everything but the models is ready.
    """
    config = config.for_server()
    if not config.cluster.colocate:
        # Only an engine started by hand has to ask the hub; a server has settled its revisions.
        settled = settle_revisions(config)
        config = settle_head(settled, may_ask=settled != config)
        models = start_over_ranks(config, listener, ranks, report, raise_if_stopped, hold)
        return _over(models)
    with stage("importing PyTorch"):
        import outrider.engine.inline  # noqa: F401  (the slowest import)
        from outrider.workers.device import take_cores

    hold()

    # A launcher such as Ray may have set fewer threads than there are cores.
    take_cores(config.num_threads, host_share=1, host_index=0)
    return _inline(config, report, server)


def _inline(
    config: EngineConfig, report: Report, server: ServerContext | None = None
) -> BuiltEngine:
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
    config, target, draft, _, tokenizer = check_models(config)
    sizes = group_sizes(config)
    with ExitStack() as opened:  # closed in reverse order
        ranks = SpawnedRanks(sizes, config.target.device)
        opened.callback(ranks.close)
        listener = Listener([ranks.address], ranks.secret, sizes)
        opened.callback(listener.close)
        models = start_over_ranks(config, listener, ranks, logger.info)
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
    """The status without ranks and models."""
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


def counters_of(loop: StepLoop) -> EngineCounters:
    """The counters as gateways report them. Call between steps, on the engine's thread."""
    scheduler = loop.scheduler
    drafted: Counter[int] = Counter()
    verified: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for (_, *numbers), count in scheduler.stats.rounds.items():
        for counts, number in zip((drafted, verified, accepted), numbers, strict=True):
            counts[number] += count
    return EngineCounters(
        prompt_tokens=scheduler.num_prompt_tokens,
        cached_tokens=scheduler.num_cached_tokens,
        verified_tokens=scheduler.stats.verified_tokens,
        rounds_by_drafted=_in_order(drafted),
        rounds_by_verified=_in_order(verified),
        rounds_by_accepted=_in_order(accepted),
        draft_s=loop.draft_s,
        verify_s=loop.verify_s,
        wait_s=loop.wait_s,
        proposers=_proposers(scheduler.stats),
        displaced=scheduler.num_displaced,
        fairness_preemptions=scheduler.num_fairness_preemptions,
        step_tokens=scheduler.stats.step_tokens,
        steps_by_tokens=tuple(scheduler.stats.steps_by_tokens),
    )


def _in_order(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


def _proposers(stats: SchedulerStats) -> tuple[ProposerCounters, ...]:
    checked, agreed = Counter(stats.checked), Counter(stats.agreed)
    for (name, _, num_verified, num_accepted), count in stats.rounds.items():
        if name and num_verified:
            # Draft tokens after the first rejected one were never compared.
            checked[name] += count * min(num_accepted + 1, num_verified)
            agreed[name] += count * num_accepted
    return tuple(ProposerCounters(name, checked[name], agreed[name]) for name in sorted(checked))
