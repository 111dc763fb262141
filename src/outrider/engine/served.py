"""The engine of a server: over ranks that dial in, or with the models in its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.config import EngineConfig
from outrider.engine.doorway import Doorway
from outrider.engine.over_ranks import RemoteEngine
from outrider.engine.rank_group import Report
from outrider.engine.step import StepLoop
from outrider.links.gateway_messages import EngineFacts, EngineStatus


class ServedEngine(Protocol):
    """An engine as its service knows it."""

    loop: StepLoop
    facts: EngineFacts

    def check(self) -> None:
        """Between steps of an idle engine: raise if it has lost what it cannot do without."""

    def status(self, query: int = 0) -> EngineStatus: ...

    def close(self) -> None: ...


def build_served(
    config: EngineConfig,
    doorway: Doorway,
    report: Report,
    on_draft_lost: Callable[[str], None],
    raise_if_dead: Callable[[], None],
) -> ServedEngine:
    """As `cluster.colocate` says; unset is over ranks. See `RemoteEngine` for the last two."""
    config = config.for_server()
    if config.cluster.colocate:
        from outrider.engine.local_build import LocalEngine  # torch, which ranks have elsewhere

        return LocalEngine(config, report)
    return RemoteEngine(config, doorway, report, on_draft_lost, raise_if_dead)
