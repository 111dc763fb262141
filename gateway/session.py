"""The request holder: one request, kept until its reader has every token of it.

An engine owns nothing a client must not lose. When it goes away, the session chooses another, or
waits for the next one, and submits each unfinished sample again together with the tokens its reader
has; they are computed again but not told again, so the stream only pauses.

It may itself be lost, or its reader be cut off. A resumable request then goes on in the engine, and
the session that its reader comes back to attaches to it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from outrider.errors import CapacityError, OutriderError, RequestError
from outrider.gateway.engine_link import EngineLink, EngineLost, Event
from outrider.gateway.errors import DeadlineError, RequestCancelledError, UnavailableError
from outrider.gateway.inbox import (
    DeadlinePassed,
    Ended,
    Inbox,
    OtherEvent,
    WaitedTooLong,
    first_of,
    is_well,
)
from outrider.gateway.losses import Losses
from outrider.gateway.replicas import Replicas
from outrider.gateway.resume import Resumption
from outrider.links.gateway_messages import EngineFacts, Refused, Submit, SubmittedSample
from outrider.scheduler.types import FinishReason, RequestUpdate
from outrider.text.builder import TextBuilder
from outrider.text.front_door import PreparedRequest
from outrider.text.outputs import (
    OutputDelta,
    RequestMetrics,
    RequestOutput,
    joined,
    no_token_error,
)
from outrider.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Tokens, each as often as it has log-probabilities, that may wait for a reader who lags behind.
MAX_UNREAD = 65_536


class Watch(Protocol):
    """Whoever counts what readers get."""

    def see(self, index: int, num_tokens: int, now_s: float) -> None:
        """Tokens of a sample came."""


class Session:
    """Runs a prepared request of `n` samples; `output` grows as `deltas` are read, but for
    log-probabilities, of which it has those of the last delta only.

    `facts` are those the request was prepared for. While there is no engine for it, it waits for
    `resubmit_timeout_s`. `prepared.deadline_s` is on the clock of `time.monotonic`. With a
    `resume_id`, the engine keeps the request for a reader who is cut off; `resume_token` is what
    it may come back with.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        replicas: Replicas,
        resubmit_timeout_s: float,
        resume_id: str = "",
        resume_token: str = "",
    ) -> None:
        spec = prepared.spec
        self.prepared = prepared
        self.tokenizer = tokenizer
        self.resume_token = resume_token
        self.resubmissions = 0
        self.held: list[OutputDelta] = []  # what the reader had of unfinished samples
        self.num_prompt_logprobs_held = 0
        self.watch: Watch | None = None  # sees what is passed on
        self.may_be_left: Callable[[], bool] = lambda: True  # asked when a reader is cut off
        self.output = RequestOutput(
            prepared.request_id,
            prepared.prompt,
            list(spec.prompt_ids),
            [],
            RequestMetrics(time.monotonic()),
            None if spec.params.prompt_logprobs is None else [None],
        )
        self._facts = facts
        self._replicas = replicas
        self._route = replicas.route(spec, facts)
        self._link: EngineLink | None = None  # to the engine that has the samples
        self._refused_by: list[EngineLink] = []  # for want of room
        self._resubmit_timeout_s = resubmit_timeout_s
        self._resume_id = resume_id
        self._may_attach = False
        self._has_told = False  # so that the reader has the token
        self._texts = [
            TextBuilder(prepared, index, self.output, tokenizer) for index in range(spec.params.n)
        ]
        self._running: dict[int, TextBuilder] = {}  # by the handles the engine knows samples by
        self._over: list[int] = []  # handles the engine keeps although the samples have ended
        self._connection = 0  # on which they were submitted
        self._losses = Losses()
        self._inbox = Inbox()
        self._is_held_up = False  # nothing runs until the reader has caught up
        self._ended = asyncio.Event()
        self._end_error: OutriderError | None = None

    def end(self, error: OutriderError) -> None:
        """Compute no more; the reader gets the error after what it has not read yet."""
        if self._end_error is not None:
            return
        self._end_error = error
        self._cancel(self._running)
        self._inbox.put(Ended(error))
        self._ended.set()

    def num_generated(self) -> int:
        """Tokens so far, of all samples."""
        return sum(len(output.token_ids) for output in self.output.outputs)

    def take_up(self, resumption: Resumption) -> None:
        """Begin where the reader has stopped; before `deltas`, on any thread."""
        resumption.check(self.prepared.spec, self._facts.vocab_size)
        told = [self._texts[held.index].go_on_from(held) for held in resumption.samples]
        self.held = [delta for delta in told if not self.output.outputs[delta.index].finished]
        self.num_prompt_logprobs_held = resumption.num_prompt_logprobs
        if self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None] * max(resumption.num_prompt_logprobs, 1)
        self._may_attach = bool(self._resume_id)
        self._has_told = True

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """What each step adds to each sample, or several steps where the reader is slower than
        they are. Closing the iterator early cancels the request, or leaves it to the engine if it
        is resumable."""
        with self._deadline_timer():
            try:
                self._replicas.remember(self._route)
                self._losses.begin(self.num_generated())
                await self._submit_unfinished(is_resumed=False)
                while not self.output.finished:
                    if self._is_held_up and self._inbox.is_empty:
                        await self._go_on()
                    await self._inbox.wait()
                    for text, updates in self._inbox.take_updates(self._running).items():
                        yield self._take(text, updates)
                        self._let_go(text)
                    if (event := self._inbox.take_other()) is not None:
                        await self._handle(event)
            except (asyncio.CancelledError, GeneratorExit):
                self._lose_reader()
                raise
            finally:
                self._release()

    def give_up_unless_begun(self, error: OutriderError) -> None:
        """End the request with this error, unless its first token was there before."""
        self._inbox.put(WaitedTooLong(error))

    async def _handle(self, event: OtherEvent) -> None:
        match event:
            case EngineLost(number=number):
                if number == self._connection:
                    await self._resume()
            case Refused() as refused if refused.handle in self._running:
                self._go_elsewhere(refused)
            case DeadlinePassed():
                raise self._late()
            case WaitedTooLong(error=error):
                if self.output.metrics.first_token_s is None:
                    raise error
            case Ended(error=error):
                raise error

    # -- what comes from the engine -----------------------------------------------------------

    def _take(self, text: TextBuilder, updates: Iterable[RequestUpdate]) -> OutputDelta:
        deltas: list[OutputDelta] = []
        for update in updates:
            self._raise_unless_finished_well(update.finish_reason)
            deltas.append(text.take(update, time.monotonic()))
            self._has_told = True
            if text.output.finished:
                handle = update.sample_id.handle
                del self._running[handle]
                if update.finish_reason is None:  # a stop string, which the engine knows nothing of
                    self._cancel((handle,))
                elif self._resume_id:
                    self._over.append(handle)
                elif self._link is not None:
                    self._link.forget(handle)
                break
        delta = joined(deltas)
        if self.watch is not None:
            self.watch.see(delta.index, len(delta.token_ids), time.monotonic())
        return delta

    def _lose_reader(self) -> None:
        """It may have been cut off, and come back with its token if it has one."""
        if self._link and self._resume_id and self._has_told and self.may_be_left():
            self._link.let_go((*self._running, *self._over))

    def _release(self) -> None:
        """Nobody reads any more; what was let go already is not cancelled."""
        self._cancel((*self._running, *self._over))

    def _cancel(self, handles: Iterable[int]) -> None:
        if self._link is not None:
            for handle in handles:
                self._link.cancel(handle)

    def _let_go(self, text: TextBuilder) -> None:
        """The reader has it now; no resumption needs more of it than how much it was."""
        if text.output.logprobs is not None:
            text.output.logprobs.clear()
        known = self.output.prompt_logprobs
        if known is not None and text.output.index == 0 and known[-1] is not None:
            known[:] = [None] * len(known)

    def _raise_unless_finished_well(self, reason: FinishReason | None) -> None:
        if is_well(reason):
            return
        match reason:
            case FinishReason.DEADLINE:
                raise self._late()
            case FinishReason.ERROR:
                raise no_token_error(str(self._facts.settings["target.model"]))
            case FinishReason.CANCELLED:
                raise RequestCancelledError("the engine cancelled the request; send it again.")
        raise OutriderError(f"the engine ended the request with {reason!r}; send it again.")

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"the deadline passed after {self.num_generated()} tokens; allow the request more "
            "time or lower max_tokens."
        )

    # -- what goes to the engine --------------------------------------------------------------

    async def _resume(self) -> None:
        self._running.clear()
        self._is_held_up = False
        self._losses.see(self.num_generated())
        await self._submit_unfinished(is_resumed=True)
        self.resubmissions += 1
        logger.info("resubmitted after the loss of the engine")

    def _go_elsewhere(self, refused: Refused) -> None:
        """Nothing was computed of what was submitted: whoever has no room may have neighbours that
        do. Each is asked once."""
        if not refused.is_capacity:
            raise RequestError(refused.message)
        if self._link is not None:
            self._refused_by.append(self._link)
        other = self._replicas.choose(self._route, but=self._refused_by)
        if other is None:
            raise CapacityError(refused.message)
        self._cancel(self._running)
        self._running.clear()
        self._submit(other, is_resumed=False)

    def _hold_up(self) -> None:
        """The reader lags behind: stop computing what would only be kept here for it."""
        self._is_held_up = True
        self._cancel(self._running)

    async def _go_on(self) -> None:
        self._is_held_up = False
        self._running.clear()
        link = self._link
        if link is not None and link.connected and link.number == self._connection:
            self._submit(link, is_resumed=True)  # what it keeps of the request is there
        else:
            await self._submit_unfinished(is_resumed=True)

    async def _submit_unfinished(self, *, is_resumed: bool) -> None:
        if not self.output.finished and not await self._attach():
            self._submit(await self._chosen(), is_resumed=is_resumed)

    def _submit(self, link: EngineLink, *, is_resumed: bool) -> None:
        # Nothing waits, so the samples go to the connection that was there.
        samples = self._begin(link)
        deadline_s = self.prepared.deadline_s
        spec = self.prepared.spec
        submit = Submit(
            spec if link.knows_tenants else replace(spec, cache_salt="", tenant=""),
            samples,
            None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0),
            is_resumed,
            self._resume_id,
        )
        link.submit(submit, self._events_sink)

    async def _attach(self) -> bool:
        """Whether an engine holds what the reader comes back for; then it goes on from there."""
        if not self._may_attach:
            return False
        self._may_attach = False  # whatever comes of it, there is nothing left to attach to
        if not self._replicas.connected:
            await self._chosen()
        for link in await self._replicas.holders(self._route):
            if link.connected and await self._attach_to(link):
                logger.info("attached to what the engine has gone on with")
                return True
        return False

    async def _attach_to(self, link: EngineLink) -> bool:
        samples = self._begin(link)
        try:
            if await link.attach(self._resume_id, samples, self._events_sink):
                return True
        except UnavailableError:
            if link.connected and link.number == self._connection:
                self._lose_reader()  # it may be attached yet, and the reader try again
                raise
        for handle in self._running:
            link.forget(handle)
        self._running.clear()
        return False

    def _begin(self, link: EngineLink) -> tuple[SubmittedSample, ...]:
        """Give the unfinished samples handles on the connection there is."""
        if link is not self._link or link.number != self._connection:
            self._cancel(self._over)
            self._over.clear()
        self._link, self._connection = link, link.number
        for text in self._texts:
            if not text.output.finished:
                self._running[link.new_handle()] = text
        return tuple(self._sample(handle, text) for handle, text in self._running.items())

    async def _chosen(self) -> EngineLink:
        """The engine that is to have the request; waits until there is any."""
        deadline_s = self.prepared.deadline_s
        wait_s = self._resubmit_timeout_s
        if deadline_s is not None:
            wait_s = min(wait_s, deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(wait_s):
                return await self._first_chosen()
        except TimeoutError:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise self._late() from None
            raise UnavailableError(
                f"the engine has been away for {wait_s:g} s; try again later."
            ) from None

    async def _first_chosen(self) -> EngineLink:
        while True:
            if self._end_error is not None:
                raise self._end_error
            changed = self._replicas.changed
            if (link := self._replicas.choose(self._route)) is not None:
                return link
            if self._replicas.has_only_others(self._route.model):
                raise UnavailableError(
                    "the engine came back with another model, which cannot go on with this text; "
                    "send the request again."
                )
            await first_of(changed, self._ended)

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
        self._inbox.put(event)
        if self._inbox.num_unread > MAX_UNREAD and not self._is_held_up:
            self._hold_up()

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
