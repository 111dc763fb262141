"""The engine for asyncio programs: streams over a step loop in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from outrider.config import EngineConfig
from outrider.engine.build import build_engine, chosen_config
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, EngineDeadError, OutriderError, RequestError
from outrider.scheduler.params import SamplingParams
from outrider.text.input_processor import PreparedRequest, ProcessorInput
from outrider.text.outputs import OutputDelta

logger = logging.getLogger(__name__)

_Event: TypeAlias = OutputDelta | Exception


class _Stream:
    """One reader: passes events from the engine's thread to the reader's event loop."""

    def __init__(self, num_samples: int) -> None:
        self.unfinished = num_samples  # samples still running; used by the engine's thread only
        self._loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[_Event] = asyncio.Queue()

    def post(self, event: _Event) -> None:
        with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class AsyncEngine:
    """Many concurrent `generate` streams on one `Engine`.

    Options are those of `LLM`; an existing engine may be given instead. Only the engine's thread
    touches the engine; other threads post commands to it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        if engine is None:
            engine = Engine(build_engine(chosen_config("AsyncEngine", model, config, options)))
        elif model is not None or config is not None or options:
            raise ConfigError("give either engine or options to AsyncEngine, not both.")
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._failure: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        return cls(config=config)

    async def generate(
        self,
        request_id: str,
        prompt: ProcessorInput,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """Stream a request. Leaving the iterator early cancels it."""
        params = self.engine.params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params is {params!r}; call generate(request_id, prompt, SamplingParams(...))."
            )
        prepared = self.engine.prepare(
            request_id, prompt, params, priority=priority, timeout_s=timeout_s
        )
        stream = _Stream(params.n)
        self._post(lambda: self._add(prepared, stream))
        unfinished = params.n
        try:
            while unfinished:
                event = await stream.events.get()
                if isinstance(event, Exception):
                    unfinished = 0
                    raise event
                unfinished -= event.finish_reason is not None
                yield event
        finally:
            if unfinished:
                self._commands.put(lambda: self._cancel(request_id, stream))

    def close(self) -> None:
        """Stop the thread; streams still open end with an error."""
        self._commands.put(None)
        self._thread.join()
        self.engine.close()

    def _post(self, command: Callable[[], None]) -> None:
        # In this order: `_fail` answers a command put before the failure, and one put after it is
        # refused here, so no reader waits for a thread that has ended.
        self._commands.put(command)
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure

    # -- on the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                for delta in self.engine.step():
                    self._deliver(delta)
            self._fail(EngineDeadError("the engine was closed"))
        except Exception as error:
            logger.exception("the step loop failed")
            self._fail(EngineDeadError(f"the engine has stopped: {error}"))

    def _take_commands(self) -> bool:
        """Run the posted commands; block for one if there is nothing to step."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, prepared: PreparedRequest, stream: _Stream) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self.engine.add_prepared(prepared)
        except OutriderError as error:
            stream.post(error)
            return
        self._streams[prepared.request_id] = stream

    def _cancel(self, request_id: str, stream: _Stream) -> None:
        if self._streams.get(request_id) is stream:
            self.engine.cancel(request_id)

    def _deliver(self, delta: OutputDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:
            return
        stream.unfinished -= delta.finish_reason is not None
        error = delta.output.error
        if error is None:
            stream.post(delta)
        elif stream.unfinished:
            self.engine.cancel(delta.request_id)  # the error is posted once all samples have ended
        else:
            stream.post(error)
        if not stream.unfinished:
            del self._streams[delta.request_id]

    def _fail(self, error: EngineDeadError) -> None:
        self._failure = error
        for stream in self._streams.values():
            stream.post(error)
        self._streams.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command()
