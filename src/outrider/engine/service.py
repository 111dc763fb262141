"""The engine as a process: steps its loop, and answers the gateways that dial in."""

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

from outrider.added_fields import without_added
from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine
from outrider.engine.doorway import Doorway
from outrider.engine.held import HeldRequests
from outrider.engine.speculation import SpeculationDesk
from outrider.errors import CapacityError, OutriderError
from outrider.kernels.seeds import sample_seed
from outrider.links.channel import Channel
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import (
    REVISION,
    Attach,
    Attached,
    Cancel,
    ExplainSpeculation,
    LetGo,
    Refused,
    SetSpeculation,
    StatusQuery,
    Submit,
    SubmittedSample,
    Updates,
)
from outrider.scheduler.request import Request
from outrider.scheduler.types import IN_PROCESS, FinishReason, RequestUpdate, SampleId

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
LOAD_TOLD_S = 0.1  # between messages that tell no more than the load
_MOST_UNSENT = 4096  # messages for a gateway that does not read, and so hangs
_MOST_AT_ONCE = 256  # updates of a message to somebody who comes back for many
_MOST_COMMANDS = 256  # between two steps, so that whoever asks without end holds up none
_MOST_UNHANDLED = 256  # messages of a gateway read ahead; the others wait on their way

_Command: TypeAlias = Callable[[], None]


class _Gateway:
    """One gateway's link. Its handles are its own; the link's number tells them from others'.

    A thread of its own sends, so that a gateway that hangs holds up nobody else.
    """

    def __init__(self, number: int, channel: Channel, revision: int) -> None:
        self.number = number
        self.revision = revision  # of the messages it knows
        self.channel = channel
        self.sample_ids: set[SampleId] = set()  # unfinished, and ending with the link
        self.updates: list[RequestUpdate] = []  # of the step under way
        self.told_load = 0  # the last load it was told
        self._outbox: queue.Queue[object] = queue.Queue(_MOST_UNSENT)
        self._unhandled = threading.Semaphore(_MOST_UNHANDLED)
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, message: object) -> None:
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            logger.warning(
                "%s does not read what is sent to it; it is hung up on", self.channel.peer
            )
            self.channel.close()

    def tell(self, updates: tuple[RequestUpdate, ...], load: int) -> None:
        self.told_load = load
        self.send(Updates(updates, load))

    def hang_up(self) -> None:
        self.channel.close()
        with contextlib.suppress(queue.Full):  # then its thread is sending, and notices
            self._outbox.put_nowait(None)

    def receive(self) -> object:
        """The next message, once there is room for it here; see `handled`."""
        while not self._unhandled.acquire(timeout=IDLE_CHECK_S):
            if self.channel.is_closed:
                break
        return self.channel.receive()

    def handled(self) -> None:
        """A message that was received is done with."""
        self._unhandled.release()

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self.channel.send(message)
        except LinkError as error:
            logger.info("a gateway cannot be told: %s", error)
            self.channel.close()  # it may still send heartbeats: this ends the reading, too

    def sample_id(self, handle: int) -> SampleId:
        return SampleId(self.number, handle)


class EngineService:
    """One thread steps; one more per gateway reads what it asks for.

    Nothing but the stepping thread touches the engine. When the link of a gateway ends, its
    requests are cancelled: it holds all that is needed to submit them again. Those that it
    submitted with a `resume_id` go on for a while, and another gateway may read on.
    """

    def __init__(
        self, engine: BuiltEngine, doorway: Doorway, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._scheduler = engine.loop.scheduler
        self._speculation = SpeculationDesk(self._scheduler, engine.facts.depth)
        self._clock = clock
        server = EngineConfig.from_settings(engine.facts.settings).server
        self._held = HeldRequests(server.resume_window_s, server.max_resumable, self._cancel)
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._gateways: dict[int, _Gateway] = {}  # by the numbers of their links
        self._numbers = itertools.count(IN_PROCESS + 1)
        self._load_told_s = 0.0  # when it was last told by itself
        self._welcome_lock = threading.Lock()
        self._is_closed = False
        doorway.on_gateway = self._welcome

    def run(self) -> None:
        """Step until `stop`, or until the target is lost, which raises."""
        while self._take_commands():
            self._held.expire(self._clock())
            updates = self._loop.step(self._clock())
            concerned = {gateway for update in updates if (gateway := self._sort(update))}
            for gateway in concerned:
                gateway.tell(tuple(gateway.updates), self._load)
                gateway.updates = []
            self._tell_load()
            self._speculation.look(self._clock())

    def stop(self) -> None:
        """From any thread: end `run` after the step under way."""
        self._commands.put(None)

    def close(self) -> None:
        """After `run`: hang up on all gateways, which live on and look for the next engine.

        They look at once, and find this one's door as long as it is open. Whoever comes is turned
        away: what it asked for would wait for a step that never comes.
        """
        with self._welcome_lock:
            self._is_closed = True
        for gateway in list(self._gateways.values()):
            gateway.hang_up()

    # -- on threads of their own ----------------------------------------------------------------

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
            logger.info("a gateway is gone: %s", error)
            self._commands.put(partial(self._part_with, gateway))

    # -- on the stepping thread -----------------------------------------------------------------

    @property
    def _load(self) -> int:
        """Samples that run or wait."""
        return self._scheduler.num_running + self._scheduler.num_waiting

    def _tell_load(self) -> None:
        """To gateways that hear nothing else: where they send requests depends on it."""
        now_s = time.monotonic()
        if now_s - self._load_told_s < LOAD_TOLD_S:
            return
        self._load_told_s = now_s
        for gateway in self._unaware:
            gateway.tell((), self._load)

    @property
    def _unaware(self) -> list[_Gateway]:
        load = self._load
        return [each for each in list(self._gateways.values()) if each.told_load != load]

    def _take_commands(self) -> bool:
        """Run what was asked for, waiting for something if there is nothing to step."""
        may_wait = not self._scheduler.has_work
        wait_s = LOAD_TOLD_S if may_wait and self._unaware else IDLE_CHECK_S
        for _ in range(_MOST_COMMANDS):
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
            self._held.cancel(gateway.sample_id(message.handle))
        elif isinstance(message, LetGo):
            self._held.let_go(map(gateway.sample_id, message.handles), self._clock())
        elif isinstance(message, Attach):
            self._attach(gateway, message)
        elif isinstance(message, StatusQuery):
            self._scheduler.control.tick(self._clock())  # rates fall while nothing steps
            status = self._engine.status(message.query, self._speculation.status())
            gateway.send(status if gateway.revision >= REVISION else without_added(status))
        elif isinstance(message, SetSpeculation):
            gateway.send(self._speculation.set(message))
        elif isinstance(message, ExplainSpeculation):
            gateway.send(self._speculation.explain(message))
        else:
            logger.warning("a gateway sent %s, which is not for engines", type(message).__name__)

    def _submit(self, gateway: _Gateway, submit: Submit) -> None:
        now_s = self._clock()
        first_id: SampleId | None = None
        taken: list[SubmittedSample] = []
        for sample in submit.samples:
            sample_id = gateway.sample_id(sample.handle)
            request = as_request(submit, sample, sample_id, now_s)
            try:
                displaced = self._scheduler.add(
                    request, after=first_id, is_resumed=submit.is_resumed
                )
            except OutriderError as error:
                is_capacity = isinstance(error, CapacityError)
                gateway.send(Refused(sample.handle, str(error), is_capacity))
                break
            first_id = first_id or sample_id
            taken.append(sample)
            for other in displaced:
                self._refuse_displaced(other)
        if submit.resume_id:
            self._held.add(submit.resume_id, gateway.number, taken)
        else:
            gateway.sample_ids.update(gateway.sample_id(sample.handle) for sample in taken)

    def _refuse_displaced(self, own: SampleId) -> None:
        """It waited, and another tenant's request has its place."""
        reader = self._held.forget_displaced(own)
        gateway = self._gateways.get(reader.link)
        if gateway is not None:
            gateway.sample_ids.discard(own)
            gateway.send(Refused(reader.handle, self._scheduler.full_message, is_capacity=True))

    def _attach(self, gateway: _Gateway, attach: Attach) -> None:
        found = self._held.attach(attach.resume_id, gateway.number, attach.samples)
        for reader in found.left:
            before = self._gateways.get(reader.link)
            if before is not None:
                over = RequestUpdate(reader, finish_reason=FinishReason.CANCELLED)
                before.tell((over,), self._load)
        gateway.send(Attached(attach.query, found.is_held))
        for start in range(0, len(found.updates), _MOST_AT_ONCE):
            gateway.tell(found.updates[start : start + _MOST_AT_ONCE], self._load)

    def _cancel(self, sample_id: SampleId) -> None:
        self._scheduler.cancel(sample_id)

    def _part_with(self, gateway: _Gateway) -> None:
        gateway.hang_up()
        del self._gateways[gateway.number]
        for sample_id in gateway.sample_ids:
            self._scheduler.cancel(sample_id)
        self._held.part_with(gateway.number, self._clock())

    def _sort(self, said: RequestUpdate) -> _Gateway | None:
        """Put an update with those of the gateway it concerns."""
        update = self._held.take(said)
        gateway = None if update is None else self._gateways.get(update.sample_id.link)
        if gateway is None or update is None:
            return None
        if update.finish_reason is not None:
            gateway.sample_ids.discard(update.sample_id)
        gateway.updates.append(update)
        return gateway


def as_request(
    submit: Submit, sample: SubmittedSample, sample_id: SampleId, now_s: float
) -> Request:
    """The scheduler's request for one of the samples submitted."""
    timeout_s = submit.timeout_s
    return Request(
        sample_id,
        submit.spec,
        seed=sample_seed(submit.spec.seed, sample.index),
        arrival_s=now_s,
        deadline_s=None if timeout_s is None else now_s + timeout_s,
        output_ids=sample.output_ids,
        prompt_logprobs_sent=sample.prompt_logprobs_sent,
    )
