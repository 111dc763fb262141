"""Hosts an engine in a process: opens the listener, builds the engine, serves gateways."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine, ServerContext, build_served
from outrider.engine.launch.ranks import ExternalRanks, RankLauncher, blame_ranks
from outrider.engine.over_ranks import group_sizes
from outrider.engine.rank_group import Report
from outrider.engine.service import EngineService
from outrider.errors import OutriderError
from outrider.links.gateway_messages import EngineStatus
from outrider.links.listener import Listener
from outrider.progress_stages import StageReporter


class EngineStoppedError(OutriderError):
    """The engine was stopped before it ran."""


def _no_hold() -> None:
    """The default: load the models at once."""


class EngineHost:
    """One engine from start to end. Listens from construction on; call `start`, `run` and, in any
    case, `close`, all on one thread.

    `ranks` launches the ranks if this process does. `is_checked`: the server has already compared
    the models' tokenizers.
    """

    def __init__(
        self,
        config: EngineConfig,
        addresses: Sequence[str],
        secret: str,
        ranks: RankLauncher | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        self._config = config
        self._server = ServerContext(secret, is_checked)
        self._ranks = ranks or ExternalRanks()
        self._engine: BuiltEngine | None = None
        self._service: EngineService | None = None
        self._stopping = threading.Event()
        self._listener = Listener(addresses, secret, group_sizes(config))
        self.addresses = self._listener.addresses

    def start(self, report: Report, hold: Callable[[], None] | None = None) -> None:
        """Returns once gateways are accepted, or raises. `hold` is called before a model is loaded,
        and may block."""
        with StageReporter(report):
            engine = build_served(
                self._config,
                self._listener,
                self._ranks,
                report,
                self._raise_if_stopped,
                self._server,
                hold or _no_hold,
            )
        self._service = EngineService(engine, self._listener)
        self._engine = engine

    def run(self) -> None:
        """Returns after `stop`; raises if the engine fails."""
        assert self._service is not None
        gc.freeze()  # start-up objects: a full collection takes 100 ms
        with blame_ranks(self._ranks):
            if not self._stopping.is_set():
                self._service.run()

    def stop(self) -> None:
        """From any thread: end `run` after the current step, or `start` while it waits for
        ranks."""
        self._stopping.set()
        if self._service is not None:
            self._service.stop()

    def close(self) -> None:
        """Close the links to gateways and ranks, and end the ranks it launched."""
        with ExitStack() as stack:  # closed in reverse order
            for part in (self._ranks, self._listener, self._engine, self._service):
                if part is not None:
                    stack.callback(part.close)

    def status(self) -> EngineStatus | None:
        """None before gateways are accepted."""
        return None if self._engine is None else self._engine.status()

    def change_draft(self, config: EngineConfig) -> None:
        """From any thread: the next draft to connect is the one of `config`."""
        if self._engine is None:
            raise EngineStoppedError("the engine does not run; its draft cannot be changed.")
        self._engine.change_draft(config)

    @property
    def draft_error(self) -> str:
        """Why the last draft that connected was rejected; empty if it joined."""
        return "" if self._engine is None else self._engine.draft_error()

    def _raise_if_stopped(self) -> None:
        if self._stopping.is_set():
            raise EngineStoppedError("the engine was stopped while it started.")
