"""Progress of a server's start: long stages, and a heartbeat while nothing else is reported."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from outrider.cluster.events import Event, EventKind
from outrider.cluster.serve_callbacks import Addresses, ServeCallbacks
from outrider.config import EngineConfig
from outrider.links.speculation import SpeculationStatus
from outrider.progress_stages import SOON_S, StageReporter

QUIET_S = 10.0


class StartProgress:
    """Reports long stages, and a heartbeat after every `quiet_s` without events, until the server
    is ready or the context is left. Use its `callbacks` in place of those given."""

    def __init__(
        self, callbacks: ServeCallbacks, quiet_s: float = QUIET_S, soon_s: float = SOON_S
    ) -> None:
        self.callbacks = ServeCallbacks(self._say, self._on_ready)
        self._inner = callbacks
        self._quiet_s = quiet_s
        self._last = "the start"
        self._last_s = time.monotonic()
        self._over = threading.Event()
        self._heartbeat = threading.Lock()  # none comes after the server is ready
        self._stages = StageReporter(self._say_stage, soon_s=soon_s)
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> StartProgress:
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
        self._say(Event(EventKind.STAGE, words))

    def _say(self, event: Event) -> None:
        self._last, self._last_s = event.text, time.monotonic()
        self._inner.say(event)

    def _on_ready(
        self, addresses: Addresses, speculation: SpeculationStatus | None, settled: EngineConfig
    ) -> None:
        with self._heartbeat:
            self._over.set()
        self._stages.stop()
        self._inner.on_ready(addresses, speculation, settled)

    def _watch(self) -> None:
        reported_s = self._last_s
        while not self._over.wait(self._quiet_s / 10):
            now_s = time.monotonic()
            if now_s - max(reported_s, self._last_s) < self._quiet_s:
                continue
            reported_s = now_s
            since = f"{now_s - self._last_s:.0f} s since: {self._last}"
            with self._heartbeat:
                if not self._over.is_set():
                    self._inner.say(Event(EventKind.STAGE, f"still starting, {since}"))
