"""The session of one request, kept until its reader has every token.

An engine holds nothing a client must not lose. When it is lost, the session chooses another, or
waits for one, and resubmits each unfinished sample with the tokens its reader has; their KV is
recomputed but they are not sent again, so the stream only pauses.

If the gateway or the reader's connection is lost, a resumable request continues in the engine, and
the session of the reader's next call attaches to it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Protocol

from outrider.api_types.errors import RequestCancelledError
from outrider.errors import OutriderError
from outrider.gateway.inbox import (
    DeadlinePassed,
    Inbox,
    OtherEvent,
    QueueTimeout,
    RequestEnded,
    is_normal,
)
from outrider.gateway.resume import Resumption
from outrider.gateway.routing.engine_link import EngineLost, Event
from outrider.gateway.routing.engine_losses import EngineLosses
from outrider.gateway.routing.replicas import ReplicaLinks
from outrider.gateway.submission import Submission, deadline_error
from outrider.links.gateway_messages import EngineFacts, SubmitRefused
from outrider.scheduler.types import FinishReason, RequestUpdate
from outrider.text.builder import TextBuilder, text_builders
from outrider.text.input_processor import PreparedRequest
from outrider.text.outputs import OutputDelta, joined, no_token_error
from outrider.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Unread tokens, each counted once per log-probability, at which a slow reader's request pauses.
MAX_UNREAD = 65_536


class Watch(Protocol):
    """Observes the tokens that readers get."""

    def see(self, index: int, num_tokens: int, now_s: float) -> None:
        """A sample got new tokens."""


class Session:
    """Runs a prepared request of `n` samples; `output` grows as `deltas` are read, except for
    log-probabilities: it has those of the last delta only.

    The request was prepared for an engine with `facts`. `prepared.deadline_s` is on the clock of
    `time.monotonic`. `resume_token` is what the reader resumes the request with. The others are
    those of `Submission`; `may_detach` is called when the reader is lost.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        replicas: ReplicaLinks,
        resubmit_timeout_s: float,
        resume_id: str = "",
        resume_token: str = "",
        may_detach: Callable[[], bool] = lambda: True,
    ) -> None:
        self.prepared = prepared
        self.tokenizer = tokenizer
        self.resume_token = resume_token
        self.resubmissions = 0
        self.held: list[OutputDelta] = []  # what the reader has of unfinished samples, on resume
        self.num_prompt_logprobs_held = 0
        self.watch: Watch | None = None
        self.output, self._texts = text_builders(prepared, tokenizer, time.monotonic())
        self._facts = facts
        self._submission = Submission(
            prepared,
            self.output,
            self._texts,
            facts,
            replicas,
            resubmit_timeout_s,
            resume_id,
            may_detach,
            self._events_sink,
        )
        self._losses = EngineLosses()
        self._inbox = Inbox()
        self._is_paused = False  # nothing runs until the reader has caught up

    def end(self, error: OutriderError) -> None:
        """Cancel the request; the reader gets the error after all unread output."""
        if self._submission.end(error):
            self._inbox.put(RequestEnded(error))

    def restore(self, resumption: Resumption) -> None:
        """Restore the reader's state; call it before `deltas`, on any thread."""
        resumption.check(self.prepared.spec, self._facts.vocab_size)
        restored = [self._texts[held.index].resume_from(held) for held in resumption.samples]
        self.held = [delta for delta in restored if not self.output.outputs[delta.index].finished]
        self.num_prompt_logprobs_held = resumption.num_prompt_logprobs
        if self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None] * max(resumption.num_prompt_logprobs, 1)
        self._submission.may_attach = self._submission.has_output = True

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """What each step adds to each sample; several steps are merged for a slower reader.
        Closing the iterator early cancels the request, or detaches it if it is resumable."""
        with self._deadline_timer():
            try:
                self._submission.remember()
                self._losses.begin(self.output.num_generated)
                await self._submission.submit(is_resumed=False)
                while not self.output.finished:
                    if self._is_paused and self._inbox.is_empty:
                        self._is_paused = False
                        await self._submission.submit_again()
                    await self._inbox.wait()
                    for text, updates in self._inbox.take_updates(self._submission.running).items():
                        yield self._take(text, updates)
                        self._drop_logprobs(text)
                    if (event := self._inbox.take_other()) is not None:
                        await self._handle(event)
            except (asyncio.CancelledError, GeneratorExit):
                self._submission.detach()
                raise
            finally:
                self._submission.release()

    def end_unless_started(self, error: OutriderError) -> None:
        """End the request with this error, unless it has its first token."""
        self._inbox.put(QueueTimeout(error))

    async def _handle(self, event: OtherEvent) -> None:
        match event:
            case EngineLost(number=number):
                if self._submission.lose(number):
                    await self._resume()
            case SubmitRefused() as refused if refused.handle in self._submission.running:
                self._submission.try_next_replica(refused)
            case DeadlinePassed():
                raise deadline_error(self.output)
            case QueueTimeout(error=error):
                if self.output.metrics.first_token_s is None:
                    raise error
            case RequestEnded(error=error):
                raise error

    async def _resume(self) -> None:
        self._is_paused = False
        self._losses.see(self.output.num_generated)
        await self._submission.submit(is_resumed=True)
        self.resubmissions += 1
        logger.info("resubmitted after the loss of the engine")

    # -- updates ------------------------------------------------------------------------------

    def _take(self, text: TextBuilder, updates: Iterable[RequestUpdate]) -> OutputDelta:
        deltas: list[OutputDelta] = []
        for update in updates:
            self._raise_unless_finished_well(update.finish_reason)
            deltas.append(text.take(update, time.monotonic()))
            self._submission.has_output = True
            if text.output.finished:
                is_ended = update.finish_reason is not None  # engines check no stop strings
                self._submission.finish(update.sample_id.handle, is_ended=is_ended)
                break
        delta = joined(deltas)
        if self.watch is not None:
            self.watch.see(delta.index, len(delta.token_ids), time.monotonic())
        return delta

    def _drop_logprobs(self, text: TextBuilder) -> None:
        """Drop log-probabilities that the reader has; a resumption needs only their number."""
        if text.output.logprobs is not None:
            text.output.logprobs.clear()
        known = self.output.prompt_logprobs
        if known is not None and text.output.index == 0 and known[-1] is not None:
            known[:] = [None] * len(known)

    def _raise_unless_finished_well(self, reason: FinishReason | None) -> None:
        if is_normal(reason):
            return
        match reason:
            case FinishReason.DEADLINE:
                raise deadline_error(self.output)
            case FinishReason.ERROR:
                raise no_token_error(str(self._facts.settings["target.model"]))
            case FinishReason.CANCELLED:
                raise RequestCancelledError("the engine cancelled the request; send it again.")
        raise OutriderError(f"the engine ended the request with {reason!r}; send it again.")

    # -- events -------------------------------------------------------------------------------

    def _events_sink(self, event: Event) -> None:
        self._inbox.put(event)
        if self._inbox.num_unread > MAX_UNREAD and not self._is_paused:
            self._is_paused = True  # backpressure: stop computing while the reader is too slow
            self._submission.cancel()

    @contextlib.contextmanager
    def _deadline_timer(self) -> Iterator[None]:
        if self.prepared.deadline_s is None:
            yield
            return
        left_s = self.prepared.deadline_s - time.monotonic()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(left_s, 0.0), self._inbox.put, DeadlinePassed())
        try:
            yield
        finally:
            timer.cancel()
