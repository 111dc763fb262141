"""The in-process engine: requests in, text out, one step at a time.

It never blocks and starts no thread: `LLM` steps it until all requests finish, `AsyncEngine` from
its own thread.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from outrider.engine.build import BuiltEngine
from outrider.engine.sample_requests import sample_request
from outrider.errors import EngineDeadError, OutriderError, RequestError
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import IN_PROCESS, FinishReason, RequestUpdate, SampleId
from outrider.text.builder import TextBuilder, text_builders
from outrider.text.defaults import sampling_defaults, with_defaults
from outrider.text.input_processor import InputProcessor, PreparedRequest, ProcessorInput
from outrider.text.outputs import OutputDelta, RequestOutput, no_token_error


class Engine:
    """Everything between a prompt and its text."""

    def __init__(self, built: BuiltEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.built = built
        self.input_processor = InputProcessor(built.facts, built.tokenizer)
        self._defaults = sampling_defaults(built.facts, built.config.server.generation_config)
        self._loop = built.loop
        self._scheduler = built.loop.scheduler
        self._clock = clock
        self._texts: dict[SampleId, TextBuilder] = {}
        self._sample_ids: dict[str, list[SampleId]] = {}  # unfinished samples by request id
        self._handles = itertools.count()
        self._failure: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would compute, or report a finished request."""
        return self._scheduler.has_work or bool(self._texts)

    def params(self, given: Mapping[str, Any] | None = None) -> SamplingParams:
        """The parameters of a request without `SamplingParams`: `given` over the checkpoint's
        defaults."""
        return with_defaults(given or {}, self._defaults)

    def add(
        self,
        request_id: str,
        prompt: ProcessorInput,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Check and queue a request; the returned output grows as the engine steps."""
        prepared = self.prepare(request_id, prompt, params, priority=priority, timeout_s=timeout_s)
        return self.add_prepared(prepared)

    def prepare(
        self,
        request_id: str,
        prompt: ProcessorInput,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> PreparedRequest:
        """Check a request, on any thread; its timeout starts now."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id is {request_id!r}; it must be text.")
        deadline_s = None if timeout_s is None else self._clock() + _checked_timeout_s(timeout_s)
        return self.input_processor.prepare(
            request_id, prompt, params, priority=priority, deadline_s=deadline_s
        )

    def add_prepared(self, prepared: PreparedRequest) -> RequestOutput:
        if self._failure is not None:
            raise EngineDeadError(
                f"a step did not complete ({self._failure!r}) and its state is lost; "
                "build another engine."
            )
        if prepared.request_id in self._sample_ids:
            raise RequestError(f"request id {prepared.request_id!r} is in use; choose another.")
        spec, now_s = prepared.spec, self._clock()
        output, texts = text_builders(prepared, self.built.tokenizer, now_s)
        first_id: SampleId | None = None
        for index, text in enumerate(texts):
            sample_id = SampleId(IN_PROCESS, next(self._handles))
            request = sample_request(
                spec, index, sample_id, arrival_s=now_s, deadline_s=prepared.deadline_s
            )
            try:
                self._scheduler.add(request, after=first_id)
            except OutriderError:
                self.cancel(prepared.request_id)  # the samples queued before this one
                raise
            first_id = first_id or sample_id
            self._texts[sample_id] = text
            self._sample_ids.setdefault(prepared.request_id, []).append(sample_id)
        return output

    def close(self) -> None:
        """End the processes started for it; the engine cannot be used afterwards."""
        self.built.close()

    def cancel(self, request_id: str) -> None:
        """Cancel all samples of a request; the next step returns their final deltas."""
        for sample_id in self._sample_ids.get(request_id, ()):
            self._scheduler.cancel(sample_id)

    def step(self) -> list[OutputDelta]:
        """Run one step and return its text deltas."""
        try:
            updates = self._loop.step(self._clock())
        except BaseException as error:
            self._failure = error
            raise
        now_s = self._clock()
        # Drop updates of samples that a stop string has already ended here.
        return [self._take(update, now_s) for update in updates if update.sample_id in self._texts]

    def _take(self, update: RequestUpdate, now_s: float) -> OutputDelta:
        text = self._texts[update.sample_id]
        delta = text.take(update, now_s)
        if delta.finish_reason is FinishReason.ERROR:
            delta.output.error = no_token_error(self.built.config.target.model)
        if delta.finish_reason is not None:
            del self._texts[update.sample_id]
            self._forget(delta.request_id, update.sample_id)
            if update.finish_reason is None:  # a stop string, which the scheduler has not seen
                self._scheduler.cancel(update.sample_id, FinishReason.STOP)
        return delta

    def _forget(self, request_id: str, sample_id: SampleId) -> None:
        unfinished = self._sample_ids[request_id]
        unfinished.remove(sample_id)
        if not unfinished:
            del self._sample_ids[request_id]


def _checked_timeout_s(timeout_s: Any) -> float:
    """Reject NaN: it compares false with every deadline."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not abs(timeout_s) <= sys.float_info.max:
        raise RequestError(
            f"timeout_s is {timeout_s!r}; it must be a number of seconds, or None for no limit."
        )
    return float(timeout_s)
