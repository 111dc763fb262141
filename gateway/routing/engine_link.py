"""A gateway's connection to one engine, reconnected whenever it is lost.

Connections are numbered over all links of a gateway. A session that submitted on connection 3 gets
`EngineLost(3)` after all updates of connection 3: it knows exactly which tokens it has, and cannot
mistake the loss of another connection for that of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.api_types.errors import UnavailableError
from outrider.errors import CapacityError, RequestError
from outrider.gateway.routing.queries import Queries
from outrider.links.aio import AsyncChannel, open_channel
from outrider.links.codec import GATEWAY_CODEC
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import (
    REVISION,
    Attach,
    AttachResult,
    Cancel,
    Detach,
    EngineFacts,
    EngineStatus,
    ExplainSpeculation,
    ExplainSpeculationResult,
    SetSpeculation,
    SetSpeculationResult,
    StatusQuery,
    Submit,
    SubmitRefused,
    SubmittedSample,
    Updates,
)
from outrider.links.rank_messages import Hello, Role
from outrider.links.speculation import SpeculationChange, SpeculationSettings
from outrider.scheduler.types import RequestUpdate

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
CONNECT_TIMEOUT_S = 2.0  # then the engine is located again: it may have moved
STATUS_TIMEOUT_S = 2.0
BETWEEN_STEPS_TIMEOUT_S = 10.0  # a step may be long
MAX_EXPLAINING = 16
_NO_QUERY = 0  # the query number of a message without a waiter


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens, and the secret that authenticates its clients."""

    address: str
    secret: str


Locate: TypeAlias = Callable[[], Awaitable[EngineAddress]]
"""Where the engine is now; called before every attempt: a restarted engine may have moved."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    """Connection `number` is gone; no updates follow for samples submitted on it."""

    number: int


Event: TypeAlias = RequestUpdate | SubmitRefused | EngineLost
_Message: TypeAlias = (
    Submit | Cancel | Detach | Attach | StatusQuery | SetSpeculation | ExplainSpeculation
)
Sink: TypeAlias = Callable[[Event], None]


class EngineLink:
    """Routes the engine's messages to the sinks of their samples.

    `on_connect` runs before a connection counts as up, `on_change` when one comes up or is lost.
    Links of the same gateway share `numbers` and `handles`, so that both are unique in it.
    """

    def __init__(
        self,
        locate: Locate,
        on_connect: Callable[[EngineFacts], Awaitable[None]],
        on_change: Callable[[], Awaitable[None]],
        *,
        numbers: Iterator[int] | None = None,
        handles: Iterator[int] | None = None,
    ) -> None:
        self.facts: EngineFacts | None = None  # of the last engine, also while disconnected
        self.number = 0  # of the last connection
        self.num_connections = 0  # so far
        self.num_failures = 0  # to connect, since the last success
        self.is_draining = False  # no new samples follow
        self._locate = locate
        self._on_connect = on_connect
        self._on_change = on_change
        self._channel: AsyncChannel | None = None
        self._up = asyncio.Event()
        self._sinks: dict[int, Sink] = {}  # by the handles of samples
        self._unfinished: set[int] = set()  # of these samples
        self._queries = Queries("the engine")
        self._numbers = numbers or itertools.count(1)
        self._handles = handles or itertools.count(1)
        self._address = ""  # of the last attempt to connect
        self._attempt: asyncio.Timeout | None = None  # while it is under way
        self._moved = asyncio.Event()  # the address has changed since then
        self._others_load = 0  # samples of other gateways in the engine, as last reported
        self._explaining = asyncio.Lock()  # an account takes longer than most steps
        self._num_explaining = 0
        self._change = SpeculationChange()  # all so far, for engines that connect later
        self.on_speculation: Callable[[SpeculationChange], None] | None = None

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    async def wait_connected(self, timeout_s: float) -> None:
        """Raises `TimeoutError` if there is no engine by then."""
        async with asyncio.timeout(timeout_s):
            # It may be lost again before this task runs.
            while not self._up.is_set():
                await self._up.wait()

    @property
    def knows_tenants(self) -> bool:
        """Whether the engine's release accepts tenants and cache salts."""
        return self.facts is not None and "cache.prefix_sharing" in self.facts.settings

    @property
    def load(self) -> int:
        """Samples running or waiting in the engine, estimated: others' as last reported, and this
        gateway's."""
        return self._others_load + len(self._unfinished)

    # -- samples ------------------------------------------------------------------------------

    def new_handle(self) -> int:
        """A handle for a new sample. Handles are never reused: late updates of an ended sample
        cannot reach a new one."""
        return next(self._handles)

    def submit(self, request: Submit, sink: Sink) -> None:
        """Submit samples; `sink` gets the events of each until it is forgotten or detached."""
        self._expect(request.samples, sink)
        self._send(request)

    def forget(self, handle: int) -> None:
        """The sample has ended in the engine."""
        self._unfinished.discard(handle)
        self._sinks.pop(handle, None)

    def cancel(self, handle: int) -> None:
        """Cancel the sample in the engine."""
        self._unfinished.discard(handle)
        if self._sinks.pop(handle, None) is not None and self._channel is not None:
            self._send(Cancel(handle))

    def detach(self, handles: Collection[int]) -> None:
        """Leave the samples to the engine: their reader may resume here or at another gateway."""
        for handle in handles:
            self.forget(handle)
        if handles and self._channel is not None:
            self._send(Detach(tuple(handles)))

    async def attach(
        self, resume_id: str, samples: tuple[SubmittedSample, ...], sink: Sink
    ) -> bool:
        """Resume a held request where its reader has stopped; returns whether the engine held it.
        Updates go to `sink`. Without samples, release the request for good."""
        self._expect(samples, sink)
        answer: AttachResult = await self._ask(
            lambda query: Attach(query, resume_id, samples), BETWEEN_STEPS_TIMEOUT_S
        )
        return answer.is_held

    def _expect(self, samples: tuple[SubmittedSample, ...], sink: Sink) -> None:
        for sample in samples:
            self._sinks[sample.handle] = sink
            self._unfinished.add(sample.handle)

    # -- queries ------------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        answer: EngineStatus = await self._ask(StatusQuery, STATUS_TIMEOUT_S)
        return answer

    async def set_speculation(self, change: SpeculationChange) -> SpeculationSettings:
        """For this engine from its next step on, and for its successors."""
        answer: SetSpeculationResult = await self._ask(
            lambda query: SetSpeculation(query, change), BETWEEN_STEPS_TIMEOUT_S
        )
        if answer.error:
            raise RequestError(answer.error)
        return answer.settings

    def remember_speculation(self, change: SpeculationChange) -> None:
        """Record a change for the engine's successors."""
        self._change = self._change.followed_by(change)

    async def explain_speculation(self, step: int | None, last: int) -> ExplainSpeculationResult:
        if self._num_explaining >= MAX_EXPLAINING:
            raise CapacityError(f"{MAX_EXPLAINING} such queries are waiting already; retry later.")
        self._num_explaining += 1
        try:
            async with self._explaining:
                answer: ExplainSpeculationResult = await self._ask(
                    lambda query: ExplainSpeculation(query, step, last), BETWEEN_STEPS_TIMEOUT_S
                )
        finally:
            self._num_explaining -= 1
        if answer.error:
            raise RequestError(answer.error)
        return answer

    async def _ask(self, message: Callable[[int], _Message], timeout_s: float) -> Any:
        return await self._queries.ask(self._send, message, timeout_s)

    def _send(self, message: _Message) -> None:
        if self._channel is None:
            raise UnavailableError("no engine is connected; wait for it to start.")
        try:
            self._channel.send(message)
        except LinkError:
            # `run` notices a lost connection too, and notifies every sink.
            if not self._channel.is_closed:
                raise

    # -- the connection -----------------------------------------------------------------------

    def keep_only(self, addresses: Collection[str]) -> None:
        """Drop a connection, or an attempt, to an address that is not among these."""
        if self._address in addresses:
            return
        if self._channel is not None:
            self._channel.close()
        if self._attempt is not None:
            self._attempt.reschedule(asyncio.get_running_loop().time())
        self._moved.set()

    async def run(self) -> None:
        """Keep connected until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                channel = await self._connect()
            # `locate` may raise anything; retry.
            except Exception as error:
                self.num_failures += 1
                level = logging.INFO if pause_s == FIRST_PAUSE_S else logging.DEBUG
                logger.log(level, "no engine yet, retrying: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._moved.wait(), pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            try:
                await self._on_change()
                await self._receive_all(channel)
            except LinkError as error:
                is_missed = bool(self._sinks) or not self.is_draining
                level = logging.WARNING if is_missed else logging.DEBUG
                logger.log(level, "the engine is lost: %s", error)
            except Exception:
                logger.exception("the link to the engine failed; reconnecting")
            finally:
                self._lose()
                channel.close()
            await self._on_change()

    async def _connect(self) -> AsyncChannel:
        place = await self._locate()
        self._address = place.address
        self._moved.clear()
        hello = Hello(Role.GATEWAY, REVISION, 1, os.getpid(), socket.gethostname())
        try:
            async with asyncio.timeout(None) as self._attempt:
                channel = await open_channel(
                    place.address, place.secret, hello, GATEWAY_CODEC, CONNECT_TIMEOUT_S
                )
        finally:
            self._attempt = None
        try:
            facts = await channel.receive()
            if not isinstance(facts, EngineFacts):
                raise LinkError(
                    f"the engine began with {type(facts).__name__} instead of EngineFacts; "
                    "run the same release on both sides."
                )
            await self._on_connect(facts)
        except BaseException:
            channel.close()
            raise
        self.facts = facts
        self.number = next(self._numbers)
        self.num_connections += 1
        self.num_failures = 0
        self._channel = channel
        if self._change != SpeculationChange():  # before anything is submitted
            self._send(SetSpeculation(_NO_QUERY, self._change))
        self._up.set()
        logger.info("connected to the engine at %s", place.address)
        return channel

    async def _receive_all(self, channel: AsyncChannel) -> None:
        while True:
            match await channel.receive():
                case Updates(updates=updates, load=load):
                    for update in updates:
                        if update.finish_reason is not None:
                            self._unfinished.discard(update.sample_id.handle)
                        self._deliver(update.sample_id.handle, update)
                    # Briefly too low while the last submissions are on their way.
                    self._others_load = max(load - len(self._unfinished), 0)
                case SubmitRefused() as refused:
                    self._deliver(refused.handle, refused)
                case SetSpeculationResult() as found:
                    self._keep(found)
                    self._queries.settle(found)
                case EngineStatus() | ExplainSpeculationResult() | AttachResult() as found:
                    self._queries.settle(found)
                case other:
                    raise LinkError(f"the engine sent a {type(other).__name__} out of turn.")

    def _keep(self, found: SetSpeculationResult) -> None:
        """Record an applied change, also if its caller has given up waiting."""
        if not found.error:
            self.remember_speculation(found.change)
            if found.query != _NO_QUERY and self.on_speculation is not None:
                self.on_speculation(found.change)
        elif found.query == _NO_QUERY:
            logger.warning("the engine refused earlier changes of speculation: %s", found.error)

    def _deliver(self, handle: int, event: Event) -> None:
        sink = self._sinks.get(handle)
        if sink is not None:  # else it was forgotten or detached meanwhile
            sink(event)

    def _lose(self) -> None:
        self._channel = None
        self._up.clear()
        sinks, self._sinks = self._sinks, {}
        self._unfinished.clear()
        self._others_load = 0
        for sink in dict.fromkeys(sinks.values()):  # once per request
            sink(EngineLost(self.number))
        self._queries.fail("the engine was lost; try again.")
