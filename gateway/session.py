"""The request holder: one request, kept until its reader has every token of it.

The engine owns nothing a client must not lose. When it goes away, the session waits for the next
one and submits each unfinished sample again together with the tokens its reader has; they are
computed again but not told again, so the stream only pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Final

from outrider.errors import CapacityError, OutriderError, RequestError
from outrider.gateway.engine_link import EngineLink, EngineLost, Event
from outrider.gateway.errors import DeadlineError, RequestCancelledError, UnavailableError
from outrider.links.gateway_messages import EngineFacts, Refused, Submit, SubmittedSample
from outrider.scheduler.types import FinishReason, RequestUpdate
from outrider.text.builder import TextBuilder
from outrider.text.front_door import PreparedRequest
from outrider.text.outputs import OutputDelta, RequestMetrics, RequestOutput
from outrider.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Tokens, each as often as it has log-probabilities, that may wait for a reader who lags behind.
MAX_UNREAD = 65_536
# A request that takes every engine down with it must not do so for ever.
MAX_FRUITLESS_LOSSES = 3


class _DeadlinePassed:
    """The event that ends a late request."""


_LATE: Final = _DeadlinePassed()


class Session:
    """Runs a prepared request of `n` samples; `output` grows as `deltas` are read, but for
    log-probabilities, of which it has those of the last delta only.

    `facts` are those the request was prepared for. An engine that is lost may be away for
    `resubmit_timeout_s`. `prepared.deadline_s` is on the clock of
    `time.monotonic`.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        link: EngineLink,
        resubmit_timeout_s: float,
    ) -> None:
        spec = prepared.spec
        self.prepared = prepared
        self.tokenizer = tokenizer
        self.resubmissions = 0
        self.output = RequestOutput(
            prepared.request_id,
            prepared.prompt,
            list(spec.prompt_ids),
            [],
            RequestMetrics(time.monotonic()),
            None if spec.params.prompt_logprobs is None else [None],
        )
        self._facts = facts
        self._link = link
        self._resubmit_timeout_s = resubmit_timeout_s
        self._texts = [
            TextBuilder(prepared, index, self.output, tokenizer) for index in range(spec.params.n)
        ]
        self._running: dict[int, TextBuilder] = {}  # by the handles the engine knows samples by
        self._connection = 0  # on which they were submitted
        self._has_progressed = False  # since they were
        self._fruitless_losses = 0
        self._events: asyncio.Queue[Event | _DeadlinePassed] = asyncio.Queue()
        self._num_unread = 0  # in the queue, in the measure of MAX_UNREAD
        self._is_held_up = False  # nothing runs until the reader has caught up

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """What each step adds to each sample. Closing the iterator early cancels the request."""
        with self._deadline_timer():
            try:
                await self._submit_unfinished(is_resumed=False)
                while not self.output.finished:
                    if self._is_held_up and self._events.empty():
                        await self._go_on()
                    event = await self._events.get()
                    if isinstance(event, RequestUpdate):
                        self._num_unread -= _size_of(event)
                        text = self._running.get(event.sample_id.handle)
                        if text is not None:
                            yield self._take(text, event)
                            self._let_go(text, event)
                    else:
                        await self._handle(event)
            finally:
                for handle in self._running:
                    self._link.cancel(handle)

    async def _handle(self, event: Refused | EngineLost | _DeadlinePassed) -> None:
        match event:
            case EngineLost(number=number):
                if number == self._connection:
                    await self._resume()
            case Refused(message=message, is_capacity=is_capacity):
                raise CapacityError(message) if is_capacity else RequestError(message)
            case _DeadlinePassed():
                raise self._late()

    # -- what comes from the engine -----------------------------------------------------------

    def _take(self, text: TextBuilder, update: RequestUpdate) -> OutputDelta:
        self._raise_unless_finished_well(update.finish_reason)
        delta = text.take(update, time.monotonic())
        self._has_progressed = self._has_progressed or bool(update.token_ids)
        if delta.finish_reason is not None:
            handle = update.sample_id.handle
            del self._running[handle]
            if update.finish_reason is None:  # a stop string, which the engine knows nothing of
                self._link.cancel(handle)
            else:
                self._link.forget(handle)
        return delta

    def _let_go(self, text: TextBuilder, update: RequestUpdate) -> None:
        """The reader has it now; no resumption needs more of it than how much it was."""
        if text.output.logprobs is not None:
            text.output.logprobs.clear()
        known = self.output.prompt_logprobs
        if known is not None and update.prompt_logprobs:
            known[:] = [None] * len(known)

    def _raise_unless_finished_well(self, reason: str | None) -> None:
        match reason:
            case None | FinishReason.STOP | FinishReason.LENGTH:
                return
            case FinishReason.DEADLINE:
                raise self._late()
            case FinishReason.CANCELLED:
                raise RequestCancelledError("the engine cancelled the request; send it again.")
        raise OutriderError(f"the engine ended the request with {reason!r}; send it again.")

    def _late(self) -> DeadlineError:
        num_tokens = sum(len(output.token_ids) for output in self.output.outputs)
        return DeadlineError(
            f"the deadline passed after {num_tokens} tokens; allow the request more time or "
            "lower max_tokens."
        )

    # -- what goes to the engine --------------------------------------------------------------

    async def _resume(self) -> None:
        self._running.clear()
        self._is_held_up = False
        self._fruitless_losses = 0 if self._has_progressed else self._fruitless_losses + 1
        self._has_progressed = False
        if self._fruitless_losses >= MAX_FRUITLESS_LOSSES:
            raise UnavailableError(
                f"the engine was lost {self._fruitless_losses} times in a row without a token for "
                "this request; try again later."
            )
        await self._submit_unfinished(is_resumed=True)
        self.resubmissions += 1
        logger.info("resubmitted after the loss of the engine")

    def _hold_up(self) -> None:
        """The reader lags behind: stop computing what would only be kept here for it."""
        self._is_held_up = True
        for handle in self._running:
            self._link.cancel(handle)

    async def _go_on(self) -> None:
        self._is_held_up = False
        self._running.clear()
        await self._submit_unfinished(is_resumed=True)

    async def _submit_unfinished(self, *, is_resumed: bool) -> None:
        await self._wait_for_engine()
        # From here on nothing waits, so the samples go to the connection that was there.
        self._connection = self._link.number
        for text in self._texts:
            if not text.output.finished:
                self._running[self._link.new_handle()] = text
        deadline_s = self.prepared.deadline_s
        submit = Submit(
            self.prepared.spec,
            tuple(self._sample(handle, text) for handle, text in self._running.items()),
            None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0),
            is_resumed,
        )
        self._link.submit(submit, self._events_sink)

    async def _wait_for_engine(self) -> None:
        deadline_s = self.prepared.deadline_s
        wait_s = self._resubmit_timeout_s
        if deadline_s is not None:
            wait_s = min(wait_s, deadline_s - time.monotonic())
        try:
            await self._link.wait_connected(wait_s)
        except TimeoutError:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise self._late() from None
            raise UnavailableError(
                f"the engine has been away for {wait_s:g} s; try again later."
            ) from None
        facts = self._link.facts
        assert facts is not None
        if _model_of(facts) != _model_of(self._facts):
            raise UnavailableError(
                "the engine came back with another model, which cannot go on with this text; "
                "send the request again."
            )

    def _sample(self, handle: int, text: TextBuilder) -> SubmittedSample:
        output = text.output
        had = self._prompt_logprobs_had(output.index)
        return SubmittedSample(handle, output.index, tuple(output.token_ids), had)

    def _prompt_logprobs_had(self, index: int) -> int:
        """The first sample reports them for all, so the others want none."""
        known = self.output.prompt_logprobs
        if known is None:
            return 0
        return len(known) - 1 if index == 0 else len(self.prepared.spec.prompt_ids) - 1

    # -- events -------------------------------------------------------------------------------

    def _events_sink(self, event: Event) -> None:
        self._events.put_nowait(event)
        if isinstance(event, RequestUpdate):
            self._num_unread += _size_of(event)
            if self._num_unread > MAX_UNREAD and not self._is_held_up:
                self._hold_up()

    @contextlib.contextmanager
    def _deadline_timer(self) -> Iterator[None]:
        if self.prepared.deadline_s is None:
            yield
            return
        left_s = self.prepared.deadline_s - time.monotonic()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(left_s, 0.0), self._events.put_nowait, _LATE)
        try:
            yield
        finally:
            timer.cancel()


def _size_of(update: RequestUpdate) -> int:
    tops = (len(found.top) for found in (*update.logprobs, *update.prompt_logprobs))
    return len(update.token_ids) + sum(tops)


def _model_of(facts: EngineFacts) -> tuple[object, ...]:
    """What must be the same for a text to go on."""
    settings = facts.settings
    return settings.get("target.model"), settings.get("target.revision"), facts.vocab_size
