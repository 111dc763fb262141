"""From a configuration to a running engine that serves from its own process (colocated)."""

from __future__ import annotations

import dataclasses
import os
import socket
import time

from outrider.config import EngineConfig
from outrider.engine.inline import build_engine, place_models
from outrider.engine.rank_group import Report
from outrider.engine.status import load_of
from outrider.links.gateway_messages import EngineStatus, ModelStatus
from outrider.links.rank_messages import DRAFT, TARGET
from outrider.workers.device import take_cores


class LocalEngine:
    """Both models and the step loop over them. It has no ranks: what ends a model ends it all."""

    def __init__(self, config: EngineConfig, report: Report) -> None:
        roles = [TARGET] if config.draft.model is None else [TARGET, DRAFT]
        device = str(place_models(config).device)
        pid, host = os.getpid(), socket.gethostname()
        self._models = tuple(ModelStatus(role, pid, host, device) for role in roles)
        names = " and ".join(roles)
        report(f"{names}: loading on {device} in the engine's process (pid {pid})")
        start_s = time.monotonic()
        # A launcher may have left fewer threads than there are cores, as Ray does.
        take_cores(config.num_threads, host_share=1, host_index=0)
        self._built = build_engine(config)
        report(f"{names}: ready to run after {time.monotonic() - start_s:.1f} s")
        self.loop = self._built.loop
        self.facts = self._built.facts

    def check(self) -> None:
        """There is nothing that could be lost without this process."""

    def status(self, query: int = 0) -> EngineStatus:
        return dataclasses.replace(load_of(self.loop.scheduler, query), models=self._models)

    def close(self) -> None:
        self._built.close()
