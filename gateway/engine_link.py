"""A gateway's connection to one engine, made again whenever it is lost.

Connections are numbered, over all links of a gateway. A reader whose sample was submitted on
connection 3 is told that 3 was lost, after everything that 3 still brought; so it knows exactly
which tokens it has, and cannot take the loss of another connection for that of its own.
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

from outrider.errors import CapacityError, RequestError
from outrider.gateway.errors import UnavailableError
from outrider.links.aio import AsyncChannel, open_channel
from outrider.links.codec import GATEWAY_CODEC
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import (
    REVISION,
    Attach,
    Attached,
    Cancel,
    EngineFacts,
    EngineStatus,
    ExplainSpeculation,
    LetGo,
    Refused,
    SetSpeculation,
    SpeculationExplained,
    SpeculationSet,
    StatusQuery,
    Submit,
    SubmittedSample,
    Updates,
)
from outrider.links.rank_messages import Hello, Role
from outrider.links.speculation import SpeculationChange, SpeculationSettings
from outrider.scheduler.types import RequestUpdate

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
CONNECT_TIMEOUT_S = 2.0  # after that the engine may be somewhere else
STATUS_TIMEOUT_S = 2.0
BETWEEN_STEPS_TIMEOUT_S = 10.0  # a step may be long
MAX_EXPLAINING = 16
_NOBODY = 0  # waits for the answer to a query of this number


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens, and the secret it shares with those who may dial in."""

    address: str
    secret: str


Locate: TypeAlias = Callable[[], Awaitable[EngineAddress]]
"""Where the engine is now; asked before every attempt, as a restarted one is somewhere else."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    """Connection `number` is gone; nothing follows of what was submitted on it."""

    number: int


Event: TypeAlias = RequestUpdate | Refused | EngineLost
_Question: TypeAlias = Attach | StatusQuery | SetSpeculation | ExplainSpeculation
_Answer: TypeAlias = Attached | EngineStatus | SpeculationSet | SpeculationExplained
_Message: TypeAlias = Submit | Cancel | LetGo | _Question
Sink: TypeAlias = Callable[[Event], None]


class EngineLink:
    """Routes what the engine says to the sample it is about.

    `on_connect` runs before a connection counts as made, `on_change` when one is made or lost.
    Links of the same gateway share the counts of `numbers` and `handles`, so that neither a
    connection nor a sample of one can be taken for another's.
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
        self.facts: EngineFacts | None = None  # of the last engine, also while there is none
        self.number = 0  # of the last connection
        self.num_connections = 0  # so far
        self.num_failures = 0  # to connect, since the last time
        self.is_draining = False  # nothing new will be submitted
        self._locate = locate
        self._on_connect = on_connect
        self._on_change = on_change
        self._channel: AsyncChannel | None = None
        self._up = asyncio.Event()
        self._sinks: dict[int, Sink] = {}  # by the handles of samples
        self._unfinished: set[int] = set()  # of these samples
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._numbers = numbers or itertools.count(1)
        self._handles = handles or itertools.count(1)
        self._serial = itertools.count(_NOBODY + 1)
        self._address = ""  # of the last attempt to connect
        self._attempt: asyncio.Timeout | None = None  # while it is under way
        self._moved = asyncio.Event()  # since then
        self._others_load = 0  # samples in the engine that are not this gateway's, as last told
        self._explaining = asyncio.Lock()  # an account takes longer than most steps
        self._num_explaining = 0
        self._change = SpeculationChange()  # made of speculation so far, for engines to come
        self.on_speculation: Callable[[SpeculationChange], None] | None = None  # hears of more

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    async def wait_connected(self, timeout_s: float) -> None:
        """Raises `TimeoutError` if there is no engine by then."""
        async with asyncio.timeout(timeout_s):
            # It may be lost again between the connection and this task's turn.
            while not self._up.is_set():
                await self._up.wait()

    @property
    def knows_tenants(self) -> bool:
        """Whether its release takes a tenant and a salt with requests."""
        return self.facts is not None and "cache.prefix_sharing" in self.facts.settings

    @property
    def load(self) -> int:
        """Samples that run or wait in the engine, as far as is known: what it last told, with what
        was submitted here or has ended here since."""
        return self._others_load + len(self._unfinished)

    # -- samples ------------------------------------------------------------------------------

    def new_handle(self) -> int:
        """For a sample to be submitted. No other had it, so nothing that is still said about one
        that is over can reach the new one."""
        return next(self._handles)

    def submit(self, request: Submit, sink: Sink) -> None:
        """Hand samples to the engine; `sink` gets everything about each until it is let go."""
        self._expect(request.samples, sink)
        self._send(request)

    def forget(self, handle: int) -> None:
        """The engine has ended this sample."""
        self._unfinished.discard(handle)
        self._sinks.pop(handle, None)

    def cancel(self, handle: int) -> None:
        """Nobody reads this sample any more."""
        self._unfinished.discard(handle)
        if self._sinks.pop(handle, None) is not None and self._channel is not None:
            self._send(Cancel(handle))

    def let_go(self, handles: Collection[int]) -> None:
        """The reader of these samples is gone but may come back, here or at another gateway."""
        for handle in handles:
            self.forget(handle)
        if handles and self._channel is not None:
            self._send(LetGo(tuple(handles)))

    async def attach(
        self, resume_id: str, samples: tuple[SubmittedSample, ...], sink: Sink
    ) -> bool:
        """Read on where a reader has stopped, if the engine holds it; what follows goes to `sink`.
        Without samples, let go of the request for good."""
        self._expect(samples, sink)
        query = next(self._serial)
        message = Attach(query, resume_id, samples)
        answer: Attached = await self._ask(query, message, BETWEEN_STEPS_TIMEOUT_S)
        return answer.is_held

    def _expect(self, samples: tuple[SubmittedSample, ...], sink: Sink) -> None:
        for sample in samples:
            self._sinks[sample.handle] = sink
            self._unfinished.add(sample.handle)

    # -- questions ----------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        query = next(self._serial)
        answer: EngineStatus = await self._ask(query, StatusQuery(query), STATUS_TIMEOUT_S)
        return answer

    async def set_speculation(self, change: SpeculationChange) -> SpeculationSettings:
        """For this engine from its next step on, and for those that come after it."""
        query = next(self._serial)
        message = SetSpeculation(query, change)
        answer: SpeculationSet = await self._ask(query, message, BETWEEN_STEPS_TIMEOUT_S)
        if answer.error:
            raise RequestError(answer.error)
        return answer.settings

    def remember_speculation(self, change: SpeculationChange) -> None:
        """For engines to come; this one knows."""
        self._change = self._change.followed_by(change)

    async def explain_speculation(self, step: int | None, last: int) -> SpeculationExplained:
        if self._num_explaining >= MAX_EXPLAINING:
            raise CapacityError(f"{MAX_EXPLAINING} accounts are asked for already; retry later.")
        query = next(self._serial)
        message = ExplainSpeculation(query, step, last)
        self._num_explaining += 1
        try:
            async with self._explaining:
                answer: SpeculationExplained = await self._ask(
                    query, message, BETWEEN_STEPS_TIMEOUT_S
                )
        finally:
            self._num_explaining -= 1
        if answer.error:
            raise RequestError(answer.error)
        return answer

    async def _ask(self, query: int, message: _Question, timeout_s: float) -> Any:
        if self._channel is None:
            raise UnavailableError("no engine is connected; wait for it to start.")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise UnavailableError(
                f"the engine has not answered for {timeout_s:g} s; try again later."
            ) from None
        finally:
            self._queries.pop(query, None)

    def _send(self, message: _Message) -> None:
        if self._channel is None:
            raise UnavailableError("no engine is connected; wait for it to start.")
        try:
            self._channel.send(message)
        except LinkError:
            # A lost connection is noticed by `run` too, which tells every sink.
            if not self._channel.is_closed:
                raise

    # -- the connection -----------------------------------------------------------------------

    def keep_only(self, addresses: Collection[str]) -> None:
        """An engine that is, or is looked for, at another address is not there any more."""
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
            # Whoever locates the engine may fail in ways of their own, and may do better next time.
            except Exception as error:
                self.num_failures += 1
                level = logging.INFO if pause_s == FIRST_PAUSE_S else logging.DEBUG
                logger.log(level, "no engine yet, trying on: %s", error)
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
                logger.exception("the link to the engine failed; connecting anew")
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
            self._send(SetSpeculation(_NOBODY, self._change))
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
                    # Too low for a moment if what was submitted last had not arrived there yet.
                    self._others_load = max(load - len(self._unfinished), 0)
                case Refused() as refused:
                    self._deliver(refused.handle, refused)
                case SpeculationSet() as found:
                    self._keep(found)
                    self._settle(found)
                case EngineStatus() | SpeculationExplained() | Attached() as found:
                    self._settle(found)
                case other:
                    raise LinkError(f"the engine sent a {type(other).__name__} out of turn.")

    def _keep(self, found: SpeculationSet) -> None:
        """Also if nobody waits for the answer any more: what was changed is to last."""
        if not found.error:
            self.remember_speculation(found.change)
            if found.query != _NOBODY and self.on_speculation is not None:
                self.on_speculation(found.change)
        elif found.query == _NOBODY:
            logger.warning("the engine takes what was set before otherwise: %s", found.error)

    def _settle(self, found: _Answer) -> None:
        answer = self._queries.pop(found.query, None)
        if answer is not None and not answer.done():
            answer.set_result(found)

    def _deliver(self, handle: int, event: Event) -> None:
        sink = self._sinks.get(handle)
        if sink is not None:  # else it was let go a moment ago
            sink(event)

    def _lose(self) -> None:
        self._channel = None
        self._up.clear()
        sinks, self._sinks = self._sinks, {}
        self._unfinished.clear()
        self._others_load = 0
        for sink in dict.fromkeys(sinks.values()):  # a request of several samples hears it once
            sink(EngineLost(self.number))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(UnavailableError("the engine was lost; try again."))
