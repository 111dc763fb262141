"""An engine without a model, for the tests of what stands before it.

`FakeEngine` speaks the real link protocol over a Unix socket from a thread. Its model is a script:
the token at a position depends on the sample's seed and on that position only, as with a real one
whose text survives restarts. It can die in the middle of a stream and come back. Resumable
requests it holds as the real one does, by the real one's record of them.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from outrider.client import Client
from outrider.config import EngineConfig, ServerConfig
from outrider.engine.resumable_requests import ResumableRequests
from outrider.engine.speculation import SpeculationService
from outrider.gateway.frontend import Frontend
from outrider.gateway.routing.engine_link import EngineLink
from outrider.kernels.seeds import sample_seed
from outrider.links.address import listen
from outrider.links.channel import Channel, wait_any
from outrider.links.codec import GATEWAY_CODEC
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import (
    Attach,
    AttachResult,
    Cancel,
    Detach,
    EngineCounters,
    EngineFacts,
    EngineStatus,
    ExplainSpeculation,
    ProcessState,
    RankStatus,
    SetSpeculation,
    StatusQuery,
    Submit,
    SubmitRefused,
    SubmittedSample,
    Updates,
)
from outrider.links.handshake import receive_greeting
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.outcomes import SchedulerStats
from outrider.scheduler.types import (
    FinishReason,
    RequestSpec,
    RequestUpdate,
    SampleId,
    TokenLogprobs,
)
from outrider.text.tokenizer import load_tokenizer

T = TypeVar("T")

MODEL = "smollm2-135m-draft"
SECRET = "a secret of the tests"
EOS = 2
VOCAB_SIZE = 49152
RANKS = (
    RankStatus("target", 0, 101, "here", "cpu", ProcessState.READY),
    RankStatus("target", 1, 102, "here", "cpu", ProcessState.READY),
    RankStatus("draft", 0, 103, "here", "cpu", ProcessState.STARTING),
)
Script = Callable[[int, int], int]
"""The token at an absolute position, for a sample's seed."""


def scripted_token(seed: int, position: int) -> int:
    """Any token that is not special; some are parts of characters."""
    mixed = (seed ^ (position * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 % 2**64
    return 1000 + (mixed >> 20) % 40000


def fake_facts(**options: Any) -> EngineFacts:
    config = EngineConfig.from_kwargs(model=MODEL, draft_model=MODEL, **options)
    return EngineFacts(
        settings=config.to_settings(),
        vocab_size=VOCAB_SIZE,
        eos_ids=(EOS,),
        max_model_len=512,
        depth=3,
        has_draft=True,
        kernels="fake",
        num_blocks=64,
    )


def fake_desk() -> SpeculationService:
    """Of an engine that has not stepped yet."""
    scheduler: Any = SimpleNamespace(
        control=SpeculationControl(), stats=SchedulerStats(), num_running=0
    )
    return SpeculationService(scheduler, depth=3)


@dataclass(slots=True)
class _Running:
    sample_id: SampleId
    resume_id: str
    spec: RequestSpec
    sample: SubmittedSample
    seed: int
    tokens: list[int]
    late_s: float
    num_cached: int
    is_first: bool = True


@dataclass(slots=True)
class FakeEngine:
    """`deaths` are numbers of tokens, counted over the engine's lives, after which it dies; it is
    back `down_s` later. What it computed in its last step is told, unless `loses_last_step`.
    `refuse` answers a submission with a refusal."""

    address: str
    facts: EngineFacts = field(default_factory=fake_facts)
    script: Script = scripted_token
    step_s: float = 0.001
    deaths: list[int] = field(default_factory=list)
    down_s: float = 0.02
    loses_last_step: bool = False
    refuse: Callable[[Submit], SubmitRefused | None] = lambda submit: None
    is_paused: bool = False
    answers_status: bool = True
    ranks: tuple[RankStatus, ...] = RANKS
    secret: str = SECRET
    resume_window_s: float = 60.0
    max_resumable: int = 100
    counters: EngineCounters = EngineCounters()  # as its status has them

    speculation: SpeculationService = field(default_factory=fake_desk)  # of this life
    speculation_links: set[int] = field(default_factory=set)  # that have set it, in this life
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    attached: list[tuple[Attach, bool]] = field(default_factory=list)  # and whether it was held
    tokens_told: int = 0
    lives: int = 0
    _samples: dict[SampleId, _Running] = field(default_factory=dict)
    _links: dict[int, Channel] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _stopping: threading.Event = field(default_factory=threading.Event)
    _dying: threading.Event = field(default_factory=threading.Event)
    _listening: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _held: ResumableRequests = field(init=False)

    def __post_init__(self) -> None:
        self._held = self._new_held()

    def start(self) -> FakeEngine:
        self._stopping.clear()
        self._dying.clear()
        self._listening.clear()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()
        assert self._listening.wait(60)
        return self

    def stop(self) -> None:
        """Go away and stay away, until the next `start`."""
        self._stopping.set()
        self._dying.set()
        if self._thread is not None:
            self._thread.join(60)
            assert not self._thread.is_alive()

    def die(self) -> None:
        """Go away and come back."""
        self._dying.set()

    @property
    def running(self) -> set[int]:
        """Handles."""
        return {sample_id.handle for sample_id in list(self._samples)}

    @property
    def num_detached(self) -> int:
        """Requests that go on without a reader."""
        return self._held.num_detached

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._dying.clear()
            with listen(self.address) as listener:
                listener.setblocking(False)
                self.lives += 1
                self.speculation = fake_desk()
                self.speculation_links = set()
                self._held = self._new_held()
                self._listening.set()
                while not self._dying.is_set() and not self._stopping.is_set():
                    self._turn(listener)
            for channel in self._links.values():
                channel.close()
            self._links.clear()
            self._samples.clear()
            self._stopping.wait(self.down_s)

    def _new_held(self) -> ResumableRequests:
        def cancel(own: SampleId) -> None:
            self._samples.pop(own, None)

        return ResumableRequests(self.resume_window_s, self.max_resumable, cancel)

    def _turn(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            sock, _ = listener.accept()
            with suppress(LinkError):
                receive_greeting(sock, self.secret, 5)
                channel = Channel(sock, GATEWAY_CODEC, peer="the gateway")
                channel.send(self.facts)
                self._links[next(self._numbers)] = channel
        for channel in wait_any(list(self._links.values()), self.step_s):
            [link] = [number for number, each in self._links.items() if each is channel]
            try:
                self._answer(link, channel.receive())
            except LinkError:
                channel.close()
                self._part_with(link)
        self._held.expire(time.monotonic())
        if not self.is_paused:
            self._step()

    def _part_with(self, link: int) -> None:
        del self._links[link]
        for sample_id, running in list(self._samples.items()):
            if sample_id.link == link and not running.resume_id:
                del self._samples[sample_id]
        self._held.detach_link(link, time.monotonic())

    def _answer(self, link: int, message: object) -> None:
        channel = self._links[link]
        match message:
            case Submit() as submit:
                self.submitted.append(submit)
                refused = self.refuse(submit)
                if refused is not None:
                    channel.send(refused)
                    return
                for sample in submit.samples:
                    started = self._started(link, submit, sample)
                    self._samples[started.sample_id] = started
                if submit.resume_id:
                    self._held.add(submit.resume_id, link, submit.samples)
            case Cancel(handle=handle):
                self.cancelled.append(handle)
                self._held.cancel(SampleId(link, handle))
            case Detach(handles=handles):
                self._held.detach([SampleId(link, each) for each in handles], time.monotonic())
            case Attach() as attach:
                self._attach(link, attach)
            case StatusQuery(query=query) if self.answers_status:
                channel.send(self._status(query))
            case SetSpeculation() as asked if self.answers_status:
                channel.send(self.speculation.set(asked))
                self.speculation_links.add(link)
            case ExplainSpeculation() as asked if self.answers_status:
                channel.send(self.speculation.explain(asked))

    def _attach(self, link: int, attach: Attach) -> None:
        found = self._held.attach(attach.resume_id, link, attach.samples)
        self.attached.append((attach, found.is_held))
        over = [
            RequestUpdate(each, finish_reason=FinishReason.CANCELLED) for each in found.replaced
        ]
        self._links[link].send(AttachResult(attach.query, found.is_held))
        self._tell([*over, *found.updates])

    def _started(self, link: int, submit: Submit, sample: SubmittedSample) -> _Running:
        spec, timeout_s = submit.spec, submit.timeout_s
        is_first = sample is submit.samples[0]
        return _Running(
            sample_id=SampleId(link, sample.handle),
            resume_id=submit.resume_id,
            spec=spec,
            sample=sample,
            seed=sample_seed(spec.seed, sample.index),
            tokens=[*spec.prompt_ids, *sample.output_ids],
            late_s=time.monotonic() + (1e9 if timeout_s is None else timeout_s),
            num_cached=1 if is_first else len(spec.prompt_ids) - 1,
        )

    def _step(self) -> None:
        updates = []
        for sample_id, running in list(self._samples.items()):
            update = self._advance(running)
            self.tokens_told += len(update.token_ids)
            if update.finish_reason is not None:
                del self._samples[sample_id]
            shown = self._held.take(update)
            if shown is not None:
                updates.append(shown)
            if self.deaths and self.tokens_told >= self.deaths[0]:
                self.deaths.pop(0)
                self._dying.set()
                break
        if not (self.loses_last_step and self._dying.is_set()):
            self._tell(updates)

    def _tell(self, updates: list[RequestUpdate]) -> None:
        for link, channel in self._links.items():
            theirs = tuple(update for update in updates if update.sample_id.link == link)
            if theirs:
                with suppress(LinkError):
                    channel.send(Updates(theirs, len(self._samples)))

    def _advance(self, running: _Running) -> RequestUpdate:
        spec, tokens = running.spec, running.tokens
        if time.monotonic() > running.late_s:
            return RequestUpdate(running.sample_id, finish_reason=FinishReason.DEADLINE)
        num_drafted = min(spec.depth if spec.proposer else 0, spec.max_len - len(tokens) - 1)
        num_accepted = min(len(tokens) % 3, num_drafted)
        new: list[int] = []
        finish = stop = None
        for _ in range(num_accepted + 1):
            new.append(self.script(running.seed, len(tokens)))
            tokens.append(new[-1])
            if new[-1] in spec.stop_ids:
                finish, stop = FinishReason.STOP, new[-1]
                break
        if finish is None and len(tokens) >= spec.max_len:
            finish = FinishReason.LENGTH
        is_first, running.is_first = running.is_first, False
        return RequestUpdate(
            running.sample_id,
            token_ids=tuple(new),
            num_accepted=min(num_accepted, len(new)),
            num_drafted=num_drafted,
            num_verified=num_drafted,
            logprobs=() if spec.params.logprobs is None else tuple(map(_logprobs, new)),
            prompt_logprobs=_prompt_logprobs(running) if is_first else (),
            finish_reason=finish,
            stop_token_id=stop,
            num_cached_tokens=running.num_cached,
        )

    def _status(self, query: int) -> EngineStatus:
        return EngineStatus(
            query=query,
            ranks=self.ranks,
            proposal_backend="tcp",
            proposal_sends=7,
            draft_losses=self.lives - 1,
            running=len(self._samples),
            waiting=0,
            kv_blocks_used=len(self._samples),
            kv_blocks=64,
            steps=10,
            committed_tokens=self.tokens_told,
            drafted_tokens=40,
            accepted_tokens=30,
            preemptions=0,
            speculation=self.speculation.status(),
            counters=self.counters,
        )


def _prompt_logprobs(running: _Running) -> tuple[TokenLogprobs, ...]:
    if running.spec.params.prompt_logprobs is None:
        return ()
    unsent = running.spec.prompt_ids[1 + running.sample.prompt_logprobs_sent :]
    return tuple(map(_logprobs, unsent))


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.5, 3, ((token + 1, -0.5), (token + 2, -1.0)))


# -- a server before it -----------------------------------------------------------------------


@contextmanager
def running_server(
    engine: FakeEngine | list[FakeEngine],
    secret: str = SECRET,
    resubmit_timeout_s: float | None = None,
    **options: Any,
) -> Iterator[Frontend]:
    """A real gateway in a thread of its own, on free ports, before whatever has an `address`, or
    before several, which are replicas "0", "1" and so on; `options` are those of `ServerConfig`."""
    engines = engine if isinstance(engine, list) else [engine]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def build() -> Frontend:
        config = ServerConfig(port=0, grpc_port=0, **options)
        front = Frontend(secret, config, resubmit_timeout_s=resubmit_timeout_s)
        await front.start()
        await front.gateway.replicas.publish("", places_of(engines))
        return front

    front = call(build())
    try:
        yield front
    finally:
        call(front.stop(drain_s=0.0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def places_of(
    engines: list[FakeEngine], state: ReplicaState = ReplicaState.SERVING
) -> list[ReplicaPlace]:
    return [ReplicaPlace(str(i), (each.address,), state) for i, each in enumerate(engines)]


def in_loop(server: Frontend, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it where a running server's gateway runs."""
    watching = server.gateway._watching
    assert watching is not None
    return asyncio.run_coroutine_threadsafe(coroutine, watching.get_loop()).result(60)


def only_link(server: Frontend) -> EngineLink:
    """To the one engine a server has."""
    (replica,) = server.gateway.replicas
    return replica.link


@dataclass(frozen=True, slots=True)
class FakeService:
    """An engine, the server before it and a client of that."""

    engine: FakeEngine
    server: Frontend
    client: Client


@contextmanager
def fake_service(
    folder: Path, *, server: Any = None, **engine_options: Any
) -> Iterator[FakeService]:
    """`server` are fields of `ServerConfig`, the rest are those of `FakeEngine`."""
    engine = FakeEngine(f"unix:{folder}/engine.sock", **engine_options).start()
    try:
        with (
            mock.patch("outrider.gateway.served_model.load_tokenizer", fake_tokenizer_source),
            running_server(engine, **(server or {})) as running,
            Client(running.grpc_address) as client,
        ):
            client.wait_ready(20)
            yield FakeService(engine, running, client)
    finally:
        engine.stop()


@cache
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def fake_tokenizer_source(source: str, *, revision: str | None = None) -> Any:
    """Loads it once for all servers of a test run."""
    return tokenizer()
