"""Load generation of one client process: sends requests on schedule and records them.

Every scheduled request ends in exactly one record: completed, failed, timed out, or not finished
at the end of the shift.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from outrider.loadtest.clients.loop_delay import LoopDelay, Reservoir
from outrider.loadtest.clients.shifts import (
    Shift,
    append_answer,
    num_turns,
    request_for,
    share_of,
)
from outrider.loadtest.records import RequestOutcome, RequestRecord, ShiftPhase
from outrider.loadtest.requests import BenchRequest, Prompt
from outrider.loadtest.targets.base import Reply, Target, TargetFault

NOT_FINISHED = "not finished"  # at the end of the shift
CLIENT_FULL = "client full"  # at `max_outstanding` requests in flight
STOPPED_DRAIN_S = 2.0  # drain time of an interrupted run
_MESSAGE_CHARS = 300
_FAILURE_BACKOFF_S = 0.1  # closed loop: do not hammer a dead server


@dataclass(slots=True)
class ShiftProgress:
    """Request counts of the shift so far."""

    sent: int = 0
    in_flight: int = 0
    ended: int = 0


class LoadDriver:
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
        self.progress = ShiftProgress()
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
        """Runs the shift until every request sent has finished or was cancelled."""
        async with self.loop_delay:
            await self._run_stage(self._send_all())
            await self._run_stage(self._drain(self._shift.drain_s))
            if self._is_stopped:
                await self._drain(min(self._shift.drain_s, STOPPED_DRAIN_S))
            await self._cancel_remaining()

    def stop(self) -> None:
        """Stops sending. Requests in flight get a short drain; unfinished ones are discarded."""
        self._is_stopped = True
        if self._stage is not None:
            self._stage.cancel()

    async def _run_stage(self, work: Coroutine[None, None, None]) -> None:
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
        """Sends each request when it is due, independent of replies."""
        for number, due_s in self._shift.arrivals(self._client, self._clients):
            await sleep_until(due_s)
            if len(self._tasks) >= self._shift.max_outstanding:
                await asyncio.sleep(0)  # let new tasks start, so that they count as in flight
            if self.progress.in_flight >= self._shift.max_outstanding:
                self._record_client_full(number, due_s)
                continue
            self._spawn(self._run_conversation(number, due_s))

    async def _closed_loop(self) -> None:
        """Keeps `clients` requests in flight: each client sends again after its reply."""
        numbers = self._shift.request_numbers(self._client, self._clients)
        end_s = self._shift.start_s + self._shift.sending_s

        async def one_client() -> None:
            for number in numbers:
                now_s = time.monotonic()
                if self._is_over or self._is_stopped:
                    return
                if self._shift.max_requests is None and now_s >= end_s:
                    return
                is_ok = await self._run_conversation(number, now_s)
                pause_s = self._shift.load.think_s
                await asyncio.sleep(pause_s if is_ok else max(pause_s, _FAILURE_BACKOFF_S))

        for _ in range(share_of(self._shift.load.clients, self._client, self._clients)):
            self._spawn(one_client())
        if self._shift.max_requests is None:
            await sleep_until(end_s)
        elif self._tasks:
            # The time limit bounds a shift of `max_requests` too.
            await asyncio.wait(self._tasks, timeout=self._shift.sending_s)

    def _spawn(self, coroutine: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, limit_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    async def _cancel_remaining(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    # -- one conversation, one request ----------------------------------------------------------

    async def _run_conversation(self, number: int, due_s: float) -> bool:
        """Sends the turns of one prompt; each later turn is due after the think time."""
        request_options = self._shift.request_options
        prompt = self._pool[self._shift.prompt_index(number)]
        messages = list(prompt.history)
        is_ok = False
        for turn in range(num_turns(prompt, request_options)):
            reply = Reply()
            record = await self._send(
                request_for(prompt, turn, messages, request_options), reply, due_s
            )
            is_ok = record.outcome is RequestOutcome.OK
            if not is_ok or self._is_stopped or turn + 1 == num_turns(prompt, request_options):
                break
            append_answer(messages, "".join(reply.pieces))
            due_s = time.monotonic() + self._shift.load.think_s
            await sleep_until(due_s)
        return is_ok

    async def _send(self, request: BenchRequest, reply: Reply, due_s: float) -> RequestRecord:
        """Sends one request and records its outcome, whichever it is."""
        self.progress.sent += 1
        self.progress.in_flight += 1
        reply.sending()
        outcome, error, message = RequestOutcome.OK, None, None
        try:
            async with (
                asyncio.timeout(max(0.0, due_s + self._shift.timeout_s - reply.sent_s)),
                self._room,
            ):
                reply.sending()
                await self._target.send(request, reply)
        except TimeoutError:
            outcome = RequestOutcome.TIMEOUT
            message = f"did not finish within {self._shift.timeout_s:g} s of its due time"
        except TargetFault as fault:
            outcome, error, message = RequestOutcome.ERROR, fault.kind, str(fault)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            outcome, error = RequestOutcome.TIMEOUT, NOT_FINISHED
        except Exception as fault:  # a bug of the harness must not lose a record
            outcome, error = RequestOutcome.ERROR, f"client: {type(fault).__name__}"
            message = str(fault)
        record = self._record(request, reply, due_s)
        record.outcome, record.error = outcome, error
        if error == NOT_FINISHED and self._is_stopped:
            record.phase = ShiftPhase.DISCARDED
        record.message = message[:_MESSAGE_CHARS] if message else None
        self.progress.in_flight -= 1
        self.progress.ended += 1
        if self._shift.load.arrivals is not None:
            self.send_lag.add(reply.sent_s - due_s)
        self._keep(record)
        return record

    def _record(self, request: BenchRequest, reply: Reply, due_s: float) -> RequestRecord:
        shift = self._shift
        return RequestRecord(
            id=request.id,
            arm=shift.arm,
            cell=shift.load.name,
            block=shift.block,
            phase=shift.phase_at(due_s),
            category=request.category,
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

    def _record_client_full(self, number: int, due_s: float) -> None:
        """Records a due request that could not be sent as failed."""
        prompt = self._pool[self._shift.prompt_index(number)]
        request = request_for(prompt, 0, list(prompt.history), self._shift.request_options)
        reply = Reply()
        reply.sending()
        record = self._record(request, reply, due_s)
        record.error = CLIENT_FULL
        record.message = f"{self._shift.max_outstanding} requests were in flight"
        self.progress.sent += 1
        self.progress.ended += 1
        self._keep(record)


async def sleep_until(due_s: float) -> None:
    """Never returns early. uvloop's timers have millisecond resolution, and a request sent before
    its phase begins would not belong to it."""
    while (delay_s := due_s - time.monotonic()) > 0:
        await asyncio.sleep(delay_s)
