"""The engine of one process: requests in, text out, a step at a time.

It never blocks and starts no thread: `LLM` steps it until all is done, `AsyncEngine` from a
thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.engine.build import BuiltEngine
from outrider.errors import EngineDeadError, OutriderError, RequestError
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import FinishReason, RequestUpdate
from outrider.text.builder import TextBuilder
from outrider.text.front_door import FrontDoor, PreparedRequest, Prompt
from outrider.text.outputs import OutputDelta, RequestMetrics, RequestOutput


class Engine:
    """Everything between a prompt and its text."""

    def __init__(self, built: BuiltEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.built = built
        self.front_door = FrontDoor(built.facts, built.tokenizer)
        self._loop = built.loop
        self._scheduler = built.loop.scheduler
        self._clock = clock
        self._texts: dict[str, TextBuilder] = {}  # by sample id
        self._sample_ids: dict[str, list[str]] = {}  # unfinished samples by request id
        self._failure: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do something: compute, or tell a reader that its request ended."""
        return self._scheduler.has_work or bool(self._texts)

    def now_s(self) -> float:
        """The clock of deadlines and metrics."""
        return self._clock()

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Check and queue a request; the output returned grows as the engine steps."""
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        prepared = self.front_door.prepare(
            request_id, prompt, params, priority=priority, deadline_s=deadline_s
        )
        return self.add_prepared(prepared)

    def add_prepared(self, prepared: PreparedRequest) -> RequestOutput:
        if self._failure is not None:
            raise EngineDeadError(
                f"a step did not complete ({self._failure!r}) and its state is lost; "
                "build the engine anew."
            )
        if prepared.request_id in self._sample_ids:
            raise RequestError(f"request id {prepared.request_id!r} is in use; choose another.")
        now_s = self._clock()
        output = RequestOutput(
            prepared.request_id,
            prepared.prompt,
            prepared.prompt_ids,
            [],
            RequestMetrics(now_s),
            None if prepared.params.prompt_logprobs is None else [None],
        )
        first_id = prepared.sample_id(0)
        for index in range(prepared.params.n):
            sample = prepared.sample(index, now_s)
            try:
                self._scheduler.add(
                    sample, priority=prepared.priority, after=first_id if index else None
                )
            except OutriderError:
                self.cancel(prepared.request_id)  # the samples queued before this one
                raise
            text = TextBuilder(prepared, index, output, self.built.tokenizer)
            self._texts[sample.request_id] = text
            self._sample_ids.setdefault(prepared.request_id, []).append(sample.request_id)
        return output

    def close(self) -> None:
        """End what was started for it; the engine is of no use afterwards."""
        self.built.close()

    def cancel(self, request_id: str) -> None:
        """End all samples of a request; their deltas say so at the next step."""
        for sample_id in self._sample_ids.get(request_id, ()):
            self._scheduler.cancel(sample_id)

    def step(self) -> list[OutputDelta]:
        """One turn of the step loop, and the text it made."""
        try:
            updates = self._loop.step(self._clock())
        except BaseException as error:
            self._failure = error
            raise
        now_s = self._clock()
        deltas = [
            self._take(update, now_s) for update in updates if update.request_id in self._texts
        ]
        # What came in meanwhile only repeats the stops just told: seen at the next step, it would
        # end a new request of the same id.
        self._scheduler.take_updates()
        return deltas

    def _take(self, update: RequestUpdate, now_s: float) -> OutputDelta:
        text = self._texts[update.request_id]
        delta = text.take(update, now_s)
        if delta.finish_reason is not None:
            del self._texts[update.request_id]
            self._forget(delta.request_id, update.request_id)
            if update.finish_reason is None:  # a stop string: the scheduler does not know yet
                self._scheduler.cancel(update.request_id, FinishReason.STOP)
        return delta

    def _forget(self, request_id: str, sample_id: str) -> None:
        unfinished = self._sample_ids[request_id]
        unfinished.remove(sample_id)
        if not unfinished:
            del self._sample_ids[request_id]
