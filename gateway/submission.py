"""The engine's side of a session: which engine has its samples, and under which handles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from outrider.api_types.errors import DeadlineError, UnavailableError
from outrider.errors import CapacityError, OutriderError, RequestError
from outrider.gateway.inbox import first_of
from outrider.gateway.routing.engine_link import EngineLink, Event
from outrider.gateway.routing.replicas import ReplicaLinks
from outrider.links.gateway_messages import EngineFacts, Submit, SubmitRefused, SubmittedSample
from outrider.text.builder import TextBuilder
from outrider.text.input_processor import PreparedRequest
from outrider.text.outputs import RequestOutput

logger = logging.getLogger(__name__)


class Submission:
    """Submits the unfinished samples of a request to an engine with the tokens that the reader has,
    or attaches to the engine that holds them.

    It waits `resubmit_timeout_s` for an engine while there is none. With a `resume_id`, the engine
    holds the request for a reader who was disconnected, if `may_detach` agrees. The engine's events
    go to `sink`.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        output: RequestOutput,
        texts: Sequence[TextBuilder],
        facts: EngineFacts,
        replicas: ReplicaLinks,
        resubmit_timeout_s: float,
        resume_id: str,
        may_detach: Callable[[], bool],
        sink: Callable[[Event], None],
    ) -> None:
        self.running: dict[int, TextBuilder] = {}  # by the engine's handles of the samples
        self.may_attach = False  # the reader is back, and an engine may hold the request
        self.has_output = False  # the reader has the resume token
        self._prepared = prepared
        self._output = output
        self._texts = texts
        self._replicas = replicas
        self._route = replicas.route(prepared.spec, facts)
        self._resubmit_timeout_s = resubmit_timeout_s
        self._resume_id = resume_id
        self._may_detach = may_detach
        self._sink = sink
        self._link: EngineLink | None = None  # to the engine that has the samples
        self._connection = 0  # on which they were submitted
        self._refused_by: list[EngineLink] = []  # at capacity
        self._finished_handles: list[int] = []  # of ended samples, which the engine still keeps
        self._ended = asyncio.Event()
        self._end_error: OutriderError | None = None

    def remember(self) -> None:
        """Count the prompt's prefix for routing."""
        self._replicas.remember(self._route)

    async def submit(self, *, is_resumed: bool) -> None:
        """To the engine that holds the request, or to one of choice."""
        if not self._output.finished and not await self._attach():
            self._submit_to(await self._chosen(), is_resumed=is_resumed)

    async def submit_again(self) -> None:
        """After `cancel`: to the same engine if possible, which has the KV blocks."""
        self.running.clear()
        link = self._link
        if link is not None and self._is_on(link):
            self._submit_to(link, is_resumed=True)
        else:
            await self.submit(is_resumed=True)

    def try_next_replica(self, refused: SubmitRefused) -> None:
        """The engine is at capacity and computed nothing: try each other replica once."""
        if not refused.is_capacity:
            raise RequestError(refused.message)
        if self._link is not None:
            self._refused_by.append(self._link)
        other = self._replicas.choose(self._route, exclude=self._refused_by)
        if other is None:
            raise CapacityError(refused.message)
        self.cancel()
        self.running.clear()
        self._submit_to(other, is_resumed=False)

    def lose(self, connection: int) -> bool:
        """Forget samples that were lost with this connection; returns whether they were."""
        if connection != self._connection:
            return False
        self.running.clear()
        return True

    def end(self, error: OutriderError) -> bool:
        """Cancel the samples; a wait for an engine raises the error. False if it has ended."""
        if self._end_error is not None:
            return False
        self._end_error = error
        self.cancel()
        self._ended.set()
        return True

    def cancel(self) -> None:
        self._cancel(self.running)

    def finish(self, handle: int, *, is_ended: bool) -> None:
        """A sample's text is complete; `is_ended`: the engine ended it too."""
        del self.running[handle]
        if not is_ended:
            self._cancel((handle,))
        elif self._resume_id:
            self._finished_handles.append(handle)
        elif self._link is not None:
            self._link.forget(handle)

    def detach(self) -> None:
        """The reader is gone; let the engine hold the request if the reader can resume it."""
        if self._link and self._resume_id and self.has_output and self._may_detach():
            self._link.detach((*self.running, *self._finished_handles))

    def release(self) -> None:
        """Cancel what is left; detached samples stay."""
        self._cancel((*self.running, *self._finished_handles))

    def _cancel(self, handles: Iterable[int]) -> None:
        if self._link is not None:
            for handle in handles:
                self._link.cancel(handle)

    def _is_on(self, link: EngineLink) -> bool:
        """Whether the samples' connection is the link's present one."""
        return link.connected and link.number == self._connection

    def _submit_to(self, link: EngineLink, *, is_resumed: bool) -> None:
        # No await between choosing the link and sending: the connection stays the same.
        samples = self._begin(link)
        deadline_s = self._prepared.deadline_s
        spec = self._prepared.spec
        submit = Submit(
            spec if link.knows_tenants else replace(spec, cache_salt="", tenant=""),
            samples,
            None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0),
            is_resumed,
            self._resume_id,
        )
        link.submit(submit, self._sink)

    async def _attach(self) -> bool:
        """Attach to an engine that holds the request; returns whether there is one."""
        if not self.may_attach or not self._resume_id:
            return False
        self.may_attach = False  # once: afterwards nothing is held any more
        if not self._replicas.connected:
            await self._chosen()
        for link in await self._replicas.holders(self._route):
            if link.connected and await self._attach_to(link):
                logger.info("attached to the request, which the engine had continued")
                return True
        return False

    async def _attach_to(self, link: EngineLink) -> bool:
        samples = self._begin(link)
        try:
            if await link.attach(self._resume_id, samples, self._sink):
                return True
        except UnavailableError:
            if self._is_on(link):
                self.detach()  # it may attach later, and the reader resume again
                raise
        for handle in self.running:
            link.forget(handle)
        self.running.clear()
        return False

    def _begin(self, link: EngineLink) -> tuple[SubmittedSample, ...]:
        """Assign the unfinished samples handles on the link's connection."""
        if link is not self._link or link.number != self._connection:
            self._cancel(self._finished_handles)
            self._finished_handles.clear()
        self._link, self._connection = link, link.number
        for text in self._texts:
            if not text.output.finished:
                self.running[link.new_handle()] = text
        return tuple(self._sample(handle, text) for handle, text in self.running.items())

    def _sample(self, handle: int, text: TextBuilder) -> SubmittedSample:
        output = text.output
        num_known = self._num_prompt_logprobs(output.index)
        return SubmittedSample(handle, output.index, tuple(output.token_ids), num_known)

    def _num_prompt_logprobs(self, index: int) -> int:
        """Prompt log-probabilities not to report again: the first sample reports them for all."""
        known = self._output.prompt_logprobs
        if known is None:
            return 0
        return len(known) - 1 if index == 0 else len(self._prepared.spec.prompt_ids) - 1

    async def _chosen(self) -> EngineLink:
        """The engine for the request; waits until there is one."""
        deadline_s = self._prepared.deadline_s
        wait_s = self._resubmit_timeout_s
        if deadline_s is not None:
            wait_s = min(wait_s, deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(wait_s):
                return await self._first_chosen()
        except TimeoutError:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise deadline_error(self._output) from None
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
            if self._replicas.all_have_other_model(self._route.model):
                raise UnavailableError(
                    "the engine came back with another model, which cannot continue this text; "
                    "send the request again."
                )
            await first_of(changed, self._ended)


def deadline_error(output: RequestOutput) -> DeadlineError:
    """The error of a request whose deadline passed."""
    return DeadlineError(
        f"the deadline passed after {output.num_generated} tokens; allow the request more time or "
        "lower max_tokens."
    )
