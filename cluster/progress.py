"""Signs of life while a server starts: what takes long, and that it goes on at all."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from outrider.cluster.events import Event, Kind
from outrider.cluster.watching import Addresses, Watchers
from outrider.config import EngineConfig
from outrider.links.speculation import SpeculationStatus
from outrider.stages import SOON_S, StageReporter

QUIET_S = 10.0


class Progress:
    """Says which stages take long, and something every few seconds in which nothing else is said,
    until the server is ready or the context is left. `watchers` are to be told instead of those
    given."""

    def __init__(
        self, watchers: Watchers, quiet_s: float = QUIET_S, soon_s: float = SOON_S
    ) -> None:
        self.watchers = Watchers(self._say, self._on_ready)
        self._told = watchers
        self._quiet_s = quiet_s
        self._last = "the start"
        self._last_s = time.monotonic()
        self._over = threading.Event()
        self._stages = StageReporter(self._say_stage, soon_s=soon_s)
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        self._stages.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._stages.stop()

    def _say_stage(self, words: str) -> None:
        self._say(Event(Kind.STAGE, words))

    def _say(self, event: Event) -> None:
        self._last, self._last_s = event.text, time.monotonic()
        self._told.say(event)

    def _on_ready(
        self, addresses: Addresses, speculation: SpeculationStatus | None, settled: EngineConfig
    ) -> None:
        self._over.set()
        self._stages.stop()
        self._told.on_ready(addresses, speculation, settled)

    def _watch(self) -> None:
        told_s = self._last_s
        while not self._over.wait(self._quiet_s / 10):
            now_s = time.monotonic()
            if now_s - max(told_s, self._last_s) >= self._quiet_s:
                told_s = now_s
                since = f"{now_s - self._last_s:.0f} s since: {self._last}"
                self._told.say(Event(Kind.STAGE, f"still starting, {since}"))
