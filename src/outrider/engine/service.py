"""The engine's service: runs the step loop and answers gateways."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from outrider.compat_fields import without_added_fields
from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine
from outrider.engine.resumable_requests import ResumableRequests
from outrider.engine.sample_requests import sample_request
from outrider.engine.speculation import SpeculationService
from outrider.errors import CapacityError, OutriderError
from outrider.links.channel import Channel
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import (
    REVISION,
    Attach,
    AttachResult,
    Cancel,
    Detach,
    ExplainSpeculation,
    SetSpeculation,
    StatusQuery,
    Submit,
    SubmitRefused,
    SubmittedSample,
    Updates,
)
from outrider.links.listener import Listener
from outrider.scheduler.types import IN_PROCESS, FinishReason, RequestUpdate, SampleId

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
LOAD_REPORT_S = 0.1  # between messages with nothing but the load
_MAX_UNSENT = 4096  # messages queued for a gateway that does not read
_MAX_REPLAYED_UPDATES = 256  # in one message to a reader that attaches
_MAX_COMMANDS = 256  # between two steps, so that a flood of messages cannot stall the loop
_MAX_UNHANDLED = 256  # messages read ahead of a gateway; the others stay in its socket

_Command: TypeAlias = Callable[[], None]


class _Gateway:
    """One gateway's link. Handles are per gateway; the link's number makes sample ids unique.

    A separate thread sends, so that a gateway that hangs blocks no other.
    """

    def __init__(self, number: int, channel: Channel, revision: int) -> None:
        self.number = number
        self.revision = revision  # the message revision it knows
        self.channel = channel
        self.sample_ids: set[SampleId] = set()  # unfinished, and cancelled with the link
        self.updates: list[RequestUpdate] = []  # of the current step
        self.reported_load = 0  # the load it was sent last
        self._outbox: queue.Queue[object] = queue.Queue(_MAX_UNSENT)
        self._unhandled = threading.Semaphore(_MAX_UNHANDLED)
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, message: object) -> None:
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            logger.warning("%s does not read its messages; closing the link", self.channel.peer)
            self.channel.close()

    def send_updates(self, updates: tuple[RequestUpdate, ...], load: int) -> None:
        self.reported_load = load
        self.send(Updates(updates, load))

    def hang_up(self) -> None:
        self.channel.close()
        with contextlib.suppress(queue.Full):  # then its thread is sending, and notices
            self._outbox.put_nowait(None)

    def receive(self) -> object:
        """The next message, once fewer than `_MAX_UNHANDLED` are unhandled; see `handled`."""
        while not self._unhandled.acquire(timeout=IDLE_CHECK_S):
            if self.channel.is_closed:
                break
        return self.channel.receive()

    def handled(self) -> None:
        """A received message has been handled."""
        self._unhandled.release()

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self.channel.send(message)
        except LinkError as error:
            logger.info("cannot send to a gateway: %s", error)
            self.channel.close()  # also ends the reading: it may still send heartbeats

    def sample_id(self, handle: int) -> SampleId:
        return SampleId(self.number, handle)


class EngineService:
    """One thread runs the step loop; one per gateway reads its messages.

    Only the stepping thread touches the engine. When a gateway's link ends, its requests are
    cancelled: the gateway has all it needs to submit them again. Requests with a `resume_id` run
    on for a while, and any gateway may attach to them.
    """

    def __init__(
        self, engine: BuiltEngine, listener: Listener, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._scheduler = engine.loop.scheduler
        self._speculation = SpeculationService(self._scheduler, engine.facts.depth)
        self._clock = clock
        server = EngineConfig.from_settings(engine.facts.settings).server
        self._resumable = ResumableRequests(
            server.resume_window_s, server.max_resumable, self._cancel
        )
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._gateways: dict[int, _Gateway] = {}  # by the numbers of their links
        self._numbers = itertools.count(IN_PROCESS + 1)
        self._load_reported_s = 0.0  # when a message last had nothing but the load
        self._welcome_lock = threading.Lock()
        self._is_closed = False
        listener.on_gateway = self._welcome

    def run(self) -> None:
        """Step until `stop`; raises if the target is lost."""
        while self._take_commands():
            self._resumable.expire(self._clock())
            updates = self._loop.step(self._clock())
            receivers = {gateway for update in updates if (gateway := self._route(update))}
            for gateway in receivers:
                gateway.send_updates(tuple(gateway.updates), self._load)
                gateway.updates = []
            self._report_load()
            self._speculation.look(self._clock())

    def stop(self) -> None:
        """From any thread: end `run` after the current step."""
        self._commands.put(None)

    def close(self) -> None:
        """After `run`: close the links to all gateways, which then connect to the next engine.

        They reconnect at once, and this engine's listener may still be open. Such connections are
        closed: their requests would wait for a step that never comes.
        """
        with self._welcome_lock:
            self._is_closed = True
        for gateway in list(self._gateways.values()):
            gateway.hang_up()

    # -- on other threads -----------------------------------------------------------------------

    def _welcome(self, channel: Channel, revision: int = REVISION) -> None:
        with self._welcome_lock:
            if self._is_closed:
                channel.close()
                return
            gateway = _Gateway(next(self._numbers), channel, revision)
            self._gateways[gateway.number] = gateway
        gateway.send(self._engine.facts)
        logger.info("%s is connected", channel.peer)
        threading.Thread(target=self._read, args=(gateway,), daemon=True).start()

    def _read(self, gateway: _Gateway) -> None:
        try:
            while True:
                message = gateway.receive()
                self._commands.put(partial(self._handle, gateway, message))
        except LinkError as error:
            logger.info("a gateway disconnected: %s", error)
            self._commands.put(partial(self._drop_gateway, gateway))

    # -- on the stepping thread -----------------------------------------------------------------

    @property
    def _load(self) -> int:
        """Samples running or waiting."""
        return self._scheduler.num_running + self._scheduler.num_waiting

    def _report_load(self) -> None:
        """To gateways without updates: they route requests by the engines' load."""
        now_s = time.monotonic()
        if now_s - self._load_reported_s < LOAD_REPORT_S:
            return
        self._load_reported_s = now_s
        for gateway in self._outdated:
            gateway.send_updates((), self._load)

    @property
    def _outdated(self) -> list[_Gateway]:
        """Gateways that know another load than the present one."""
        load = self._load
        return [each for each in list(self._gateways.values()) if each.reported_load != load]

    def _take_commands(self) -> bool:
        """Run the queued commands; wait for one if there is nothing to step."""
        may_wait = not self._scheduler.has_work
        wait_s = LOAD_REPORT_S if may_wait and self._outdated else IDLE_CHECK_S
        for _ in range(_MAX_COMMANDS):
            try:
                command = self._commands.get(block=may_wait, timeout=wait_s)
            except queue.Empty:
                if may_wait:
                    self._engine.check()
                return True
            if command is None:
                return False
            command()
            may_wait = False
        return True

    def _handle(self, gateway: _Gateway, message: object) -> None:
        gateway.handled()
        if isinstance(message, Submit):
            self._submit(gateway, message)
        elif isinstance(message, Cancel):
            self._resumable.cancel(gateway.sample_id(message.handle))
        elif isinstance(message, Detach):
            self._resumable.detach(map(gateway.sample_id, message.handles), self._clock())
        elif isinstance(message, Attach):
            self._attach(gateway, message)
        elif isinstance(message, StatusQuery):
            self._scheduler.control.load.now_s = self._clock()  # arrival rates decay while idle
            status = self._engine.status(message.query, self._speculation.status())
            gateway.send(status if gateway.revision >= REVISION else without_added_fields(status))
        elif isinstance(message, SetSpeculation):
            gateway.send(self._speculation.set(message))
        elif isinstance(message, ExplainSpeculation):
            gateway.send(self._speculation.explain(message))
        else:
            logger.warning("a gateway sent %s, which engines do not handle", type(message).__name__)

    def _submit(self, gateway: _Gateway, submit: Submit) -> None:
        now_s, timeout_s = self._clock(), submit.timeout_s
        first_id: SampleId | None = None
        taken: list[SubmittedSample] = []
        for sample in submit.samples:
            sample_id = gateway.sample_id(sample.handle)
            request = sample_request(
                submit.spec,
                sample.index,
                sample_id,
                arrival_s=now_s,
                deadline_s=None if timeout_s is None else now_s + timeout_s,
                output_ids=sample.output_ids,
                prompt_logprobs_sent=sample.prompt_logprobs_sent,
            )
            try:
                displaced = self._scheduler.add(
                    request, after=first_id, is_resumed=submit.is_resumed
                )
            except OutriderError as error:
                is_capacity = isinstance(error, CapacityError)
                gateway.send(SubmitRefused(sample.handle, str(error), is_capacity))
                break
            first_id = first_id or sample_id
            taken.append(sample)
            for other in displaced:
                self._refuse_displaced(other)
        if submit.resume_id:
            self._resumable.add(submit.resume_id, gateway.number, taken)
        else:
            gateway.sample_ids.update(gateway.sample_id(sample.handle) for sample in taken)

    def _refuse_displaced(self, own: SampleId) -> None:
        """A waiting sample lost its place in the queue to another tenant's request."""
        reader = self._resumable.forget_displaced(own)
        gateway = self._gateways.get(reader.link)
        if gateway is not None:
            gateway.sample_ids.discard(own)
            gateway.send(
                SubmitRefused(reader.handle, self._scheduler.full_message, is_capacity=True)
            )

    def _attach(self, gateway: _Gateway, attach: Attach) -> None:
        found = self._resumable.attach(attach.resume_id, gateway.number, attach.samples)
        for reader in found.replaced:
            before = self._gateways.get(reader.link)
            if before is not None:
                over = RequestUpdate(reader, finish_reason=FinishReason.CANCELLED)
                before.send_updates((over,), self._load)
        gateway.send(AttachResult(attach.query, found.is_held))
        for start in range(0, len(found.updates), _MAX_REPLAYED_UPDATES):
            gateway.send_updates(found.updates[start : start + _MAX_REPLAYED_UPDATES], self._load)

    def _cancel(self, sample_id: SampleId) -> None:
        self._scheduler.cancel(sample_id)

    def _drop_gateway(self, gateway: _Gateway) -> None:
        gateway.hang_up()
        del self._gateways[gateway.number]
        for sample_id in gateway.sample_ids:
            self._scheduler.cancel(sample_id)
        self._resumable.detach_link(gateway.number, self._clock())

    def _route(self, found: RequestUpdate) -> _Gateway | None:
        """Append an update to those of its gateway."""
        update = self._resumable.take(found)
        gateway = None if update is None else self._gateways.get(update.sample_id.link)
        if gateway is None or update is None:
            return None
        if update.finish_reason is not None:
            gateway.sample_ids.discard(update.sample_id)
        gateway.updates.append(update)
        return gateway
