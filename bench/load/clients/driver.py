"""The event loop of one client process: sends what is due, keeps the books.

Every request that was due ends in one record, whatever happens: answered, failed, timed out, or
not finished when the shift was over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from outrider.bench.load.asks import Ask, Prompt
from outrider.bench.load.clients.loop_delay import LoopDelay, Reservoir
from outrider.bench.load.clients.shifts import Shift, answered, ask_of, num_turns, share_of
from outrider.bench.load.records import Outcome, Phase, RequestRecord
from outrider.bench.load.targets.base import Reply, Target, TargetFault

NOT_FINISHED = "not finished"  # when the shift was over
CLIENT_FULL = "client full"  # too many were under way to send another
STOPPED_DRAIN_S = 2.0  # what requests get to end in when the run is interrupted
_MESSAGE_CHARS = 300
_PAUSE_AFTER_FAILURE_S = 0.1  # in a closed loop, so that a dead server is not asked all the time


@dataclass(slots=True)
class Progress:
    """What a shift has come to so far."""

    sent: int = 0
    under_way: int = 0
    ended: int = 0


class Driver:
    """Runs one client's share of a shift against one target."""

    def __init__(
        self,
        target: Target,
        shift: Shift,
        pool: Sequence[Prompt],
        keep: Callable[[RequestRecord], None],
        *,
        client: int = 0,
        clients: int = 1,
    ) -> None:
        self.progress = Progress()
        self.loop_delay = LoopDelay()
        self.send_lag = Reservoir()
        self._target = target
        self._shift = shift
        self._pool = pool
        self._keep = keep
        self._client = client
        self._clients = clients
        self._room: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if shift.max_in_flight is not None:
            self._room = asyncio.Semaphore(share_of(shift.max_in_flight, client, clients) or 1)
        self._tasks: set[asyncio.Task[object]] = set()
        self._stage: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._is_over = False

    async def run(self) -> None:
        """To the end of the shift: everything sent has ended, or was given up."""
        async with self.loop_delay:
            await self._unless_stopped(self._send_all())
            await self._unless_stopped(self._let_end(self._shift.drain_s))
            if self._is_stopped:
                await self._let_end(min(self._shift.drain_s, STOPPED_DRAIN_S))
            await self._give_up()

    def stop(self) -> None:
        """Nothing more is sent; what is under way has a moment to end, and does not count if it
        does not."""
        self._is_stopped = True
        if self._stage is not None:
            self._stage.cancel()

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        self._stage = asyncio.create_task(work)
        if self._is_stopped:
            self._stage.cancel()
        try:
            await asyncio.wait({self._stage})
        finally:
            self._stage.cancel()
        if not self._stage.cancelled():
            self._stage.result()

    # -- sending ------------------------------------------------------------------------------

    async def _send_all(self) -> None:
        await sleep_until(self._shift.start_s)
        if self._shift.load.arrivals is not None:
            await self._open_loop()
        else:
            await self._closed_loop()

    async def _open_loop(self) -> None:
        """Sends when it is due, whatever has come back."""
        for number, due_s in self._shift.arrivals(self._client, self._clients):
            await sleep_until(due_s)
            if len(self._tasks) >= self._shift.max_outstanding:
                await asyncio.sleep(0)  # those just made begin, and count
            if self.progress.under_way >= self._shift.max_outstanding:
                self._refuse(number, due_s)
                continue
            self._spawn(self._converse(number, due_s))

    async def _closed_loop(self) -> None:
        """So many at once, each sending again when it has its answer."""
        numbers = self._shift.turns_of(self._client, self._clients)
        end_s = self._shift.start_s + self._shift.sending_s

        async def one_client() -> None:
            for number in numbers:
                now_s = time.monotonic()
                if self._is_over or self._is_stopped:
                    return
                if self._shift.max_requests is None and now_s >= end_s:
                    return
                is_ok = await self._converse(number, now_s)
                pause_s = self._shift.load.think_s
                await asyncio.sleep(pause_s if is_ok else max(pause_s, _PAUSE_AFTER_FAILURE_S))

        for _ in range(share_of(self._shift.load.clients, self._client, self._clients)):
            self._spawn(one_client())
        if self._shift.max_requests is None:
            await sleep_until(end_s)
        elif self._tasks:
            # Bounded like any other shift: by what its requests may take, one after the other.
            await asyncio.wait(self._tasks, timeout=self._shift.sending_s)

    def _spawn(self, coroutine: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_end(self, limit_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    async def _give_up(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    # -- one conversation, one request ----------------------------------------------------------

    async def _converse(self, number: int, due_s: float) -> bool:
        """The turns of one prompt; a later turn is due when the user has read and thought."""
        asking = self._shift.asking
        prompt = self._pool[self._shift.place_of(number)]
        said = list(prompt.history)
        is_ok = False
        for turn in range(num_turns(prompt, asking)):
            reply = Reply()
            record = await self._send(ask_of(prompt, turn, said, asking), reply, due_s)
            is_ok = record.outcome is Outcome.OK
            if not is_ok or self._is_stopped or turn + 1 == num_turns(prompt, asking):
                break
            answered(said, "".join(reply.pieces))
            due_s = time.monotonic() + self._shift.load.think_s
            await sleep_until(due_s)
        return is_ok

    async def _send(self, ask: Ask, reply: Reply, due_s: float) -> RequestRecord:
        """One request and its record; every way it can end is here."""
        self.progress.sent += 1
        self.progress.under_way += 1
        reply.sending()
        outcome, error, message = Outcome.OK, None, None
        try:
            async with (
                asyncio.timeout(max(0.0, due_s + self._shift.timeout_s - reply.sent_s)),
                self._room,
            ):
                reply.sending()
                await self._target.send(ask, reply)
        except TimeoutError:
            outcome = Outcome.TIMEOUT
            message = f"no end within {self._shift.timeout_s:g} s of when it was due"
        except TargetFault as fault:
            outcome, error, message = Outcome.ERROR, fault.kind, str(fault)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            outcome, error = Outcome.TIMEOUT, NOT_FINISHED
        except Exception as fault:  # a defect of ours must not lose a request either
            outcome, error = Outcome.ERROR, f"client: {type(fault).__name__}"
            message = str(fault)
        record = self._record(ask, reply, due_s)
        record.outcome, record.error = outcome, error
        if error == NOT_FINISHED and self._is_stopped:
            record.phase = Phase.DISCARDED
        record.message = message[:_MESSAGE_CHARS] if message else None
        self.progress.under_way -= 1
        self.progress.ended += 1
        if self._shift.load.arrivals is not None:
            self.send_lag.add(reply.sent_s - due_s)
        self._keep(record)
        return record

    def _record(self, ask: Ask, reply: Reply, due_s: float) -> RequestRecord:
        shift = self._shift
        return RequestRecord(
            id=ask.id,
            arm=shift.arm,
            cell=shift.load.name,
            block=shift.block,
            phase=shift.phase_at(due_s),
            category=ask.category,
            intended_s=due_s - shift.origin_s,
            sent_s=reply.sent_s - shift.origin_s,
            end_s=time.monotonic() - shift.origin_s,
            update_s=reply.update_s,
            update_tokens=reply.update_tokens,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            output_tokens=reply.output_tokens,
            counted_by=reply.counted_by,
            finish=reply.finish,
            retries=reply.retries,
            client=self._client,
            speculated=reply.speculated,
            token_ids=(reply.token_ids or None) if shift.keeps_answers else None,
            text=("".join(reply.pieces) or None) if shift.keeps_answers else None,
        )

    def _refuse(self, number: int, due_s: float) -> None:
        """A request that was due and could not be sent is a failed one."""
        prompt = self._pool[self._shift.place_of(number)]
        ask = ask_of(prompt, 0, list(prompt.history), self._shift.asking)
        reply = Reply()
        reply.sending()
        record = self._record(ask, reply, due_s)
        record.error = CLIENT_FULL
        record.message = f"{self._shift.max_outstanding} requests were under way"
        self.progress.sent += 1
        self.progress.ended += 1
        self._keep(record)


async def sleep_until(due_s: float) -> None:
    """Never back early: uvloop's timers count milliseconds, and what is sent before its phase
    begins is no part of it."""
    while (delay_s := due_s - time.monotonic()) > 0:
        await asyncio.sleep(delay_s)
