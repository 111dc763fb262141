"""An engine as a process hosts it: the door is opened, the engine built, gateways are served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine, build_served
from outrider.engine.doorway import Doorway
from outrider.engine.launch.ranks import AwaitedRanks, Ranks, ranks_blamed
from outrider.engine.over_ranks import group_sizes
from outrider.engine.rank_group import Report
from outrider.engine.server_life import ServerLife
from outrider.engine.service import EngineService
from outrider.errors import OutriderError
from outrider.garbage import leave_out_what_is_loaded
from outrider.links.gateway_messages import EngineStatus
from outrider.stages import StageReporter


class EngineStoppedError(OutriderError):
    """It was told to stop before it came to run."""


def _go_on() -> None:
    """Nothing is waited for."""


class EngineHost:
    """One life of an engine. Listens from the beginning; `start`, `run`, and `close` in any case,
    all on one thread.

    `ranks` are those this process keeps itself. `is_checked` is for those whose server has compared
    the models' tokenizers.
    """

    def __init__(
        self,
        config: EngineConfig,
        addresses: Sequence[str],
        secret: str,
        ranks: Ranks | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        self._config = config
        self._server = ServerLife(secret, is_checked)
        self._ranks = ranks or AwaitedRanks()
        self._engine: BuiltEngine | None = None
        self._service: EngineService | None = None
        self._stopping = threading.Event()
        self._doorway = Doorway(addresses, secret, group_sizes(config))
        self.addresses = self._doorway.addresses

    def start(self, report: Report, hold: Callable[[], None] | None = None) -> None:
        """Until it takes gateways. Raises what went wrong. `hold` is called, and may take its time,
        before a model is loaded."""
        with StageReporter(report):
            engine = build_served(
                self._config,
                self._doorway,
                self._ranks,
                report,
                self._raise_if_stopped,
                self._server,
                hold or _go_on,
            )
        self._service = EngineService(engine, self._doorway)
        self._engine = engine

    def run(self) -> None:
        """Until `stop`, or until it is lost, which raises."""
        assert self._service is not None
        leave_out_what_is_loaded()
        with ranks_blamed(self._ranks):
            if not self._stopping.is_set():
                self._service.run()

    def stop(self) -> None:
        """From any thread: end `run` after the step under way, or `start` while ranks are
        awaited."""
        self._stopping.set()
        if self._service is not None:
            self._service.stop()

    def close(self) -> None:
        """Hang up on gateways and ranks, and leave no rank of its own behind."""
        with ExitStack() as stack:  # the last is closed first
            for part in (self._ranks, self._doorway, self._engine, self._service):
                if part is not None:
                    stack.callback(part.close)

    def status(self) -> EngineStatus | None:
        """None before it takes gateways."""
        return None if self._engine is None else self._engine.status()

    def change_draft(self, config: EngineConfig) -> None:
        """From any thread: the draft that dials in next is the one of `config`."""
        if self._engine is None:
            raise EngineStoppedError("the engine does not run; its draft cannot be changed.")
        self._engine.change_draft(config)

    @property
    def draft_error(self) -> str:
        """Why the last draft that dialled in was not taken in; empty if it was."""
        return "" if self._engine is None else self._engine.draft_error()

    def _raise_if_stopped(self) -> None:
        if self._stopping.is_set():
            raise EngineStoppedError("the engine was stopped while it started.")
