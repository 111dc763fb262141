"""What every protocol of the gateway shares: the engines behind it and the requests in hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Sized
from enum import StrEnum
from typing import Any

from outrider.config import ServerConfig
from outrider.errors import OutriderError, RequestError
from outrider.gateway import bounds
from outrider.gateway.access_log import AccessLog
from outrider.gateway.bodies import Bodies
from outrider.gateway.callers import Caller, Callers
from outrider.gateway.calls import Call
from outrider.gateway.errors import UnavailableError, UnknownModelError
from outrider.gateway.in_hand import InHand
from outrider.gateway.limits import Admission, Limits
from outrider.gateway.metrics import CLIENT_BACK, GatewayMetrics
from outrider.gateway.preparing import Preparing
from outrider.gateway.reading import MAX_READING_BYTES, Reading, Upload
from outrider.gateway.replicas import Replicas, model_of
from outrider.gateway.request_watch import RequestWatch
from outrider.gateway.resume import ResumeTokens, new_resume_id
from outrider.gateway.served import Served, Tokenizers
from outrider.gateway.session import Session
from outrider.gateway.tenants import Tenants
from outrider.gateway.tls import TlsFiles
from outrider.gateway.watched import keep_fresh
from outrider.links.gateway_messages import EngineFacts
from outrider.quiet_log import QuietLog
from outrider.scheduler.params import SamplingParams
from outrider.text.chat import read_template
from outrider.text.defaults import sampling_defaults, with_defaults
from outrider.text.front_door import PreparedRequest, Prompt
from outrider.text.messages import Conversation
from outrider.text.templates import TemplateProcesses

logger = logging.getLogger(__name__)

# A prompt of ordinary length takes milliseconds, so the queue is seconds long at most.
PREPARING_THREADS, MAX_PREPARING = 4, 512
# Templates of clients take seconds if they mean harm, and then only hold up each other.
TEMPLATE_THREADS, MAX_TEMPLATES = 2, 16
# Token ids a request may list for them to be checked between two turns of the event loop.
MAX_INLINE_ENTRIES = 10_000


class State(StrEnum):
    """What a gateway can do for a client."""

    STARTING = "starting"  # no engine has been there yet
    SERVING = "serving"
    ENGINE_AWAY = "engine away"  # running requests wait, new ones are refused
    DRAINING = "draining"  # running requests are finished, new ones are refused


class Gateway:
    """Keeps the links to the engines and turns calls into sessions.

    `secret` is what all processes of the server share. Streams wait `resubmit_timeout_s` while
    there is no engine; not given, as long as the restart of one may take. Those in `on_state` hear
    of every change of state.
    """

    def __init__(
        self,
        secret: str,
        config: ServerConfig,
        *,
        resubmit_timeout_s: float | None = None,
    ) -> None:
        self.config = config
        path = config.chat_template
        self._chat_template = None if path is None else read_template(path)
        self.callers = Callers(config)
        self.limits = Limits(window_s=config.resume_window_s)
        self.tls = TlsFiles.of(config)
        self.metrics = GatewayMetrics()
        self._quiet_log = QuietLog(logger)
        self._access_log = AccessLog(with_prompts=config.log_prompts)
        self.replicas = Replicas(secret, self._meet, self._hear_change)
        self.on_state: list[Callable[[State], Awaitable[None]]] = []
        self._resubmit_timeout_s = resubmit_timeout_s
        self._served: Served | None = None
        self._learning = asyncio.Lock()
        self._is_draining = False
        self._started_s = time.monotonic()
        self.in_hand = InHand()
        self.reading = Reading(max(MAX_READING_BYTES, 4 * config.max_body_bytes))
        self.preparing = Preparing("prepare", PREPARING_THREADS, MAX_PREPARING)
        self._templating = Preparing("template", TEMPLATE_THREADS, MAX_TEMPLATES)
        self._templates = TemplateProcesses()
        self.bodies = Bodies(config)
        self.tokenizers = Tokenizers()
        self.resume_tokens = ResumeTokens(secret)  # as every gateway of this server has them
        self._tenants = Tenants(secret)
        self._watching: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._is_draining:
            return State.DRAINING
        if self._served is None:
            return State.STARTING
        return State.SERVING if self.replicas.is_any_usable else State.ENGINE_AWAY

    def start(self) -> None:
        files = [each for each in (self.callers.watched, self.tls and self.tls.watched) if each]
        self._watching = asyncio.create_task(keep_fresh(files), name="outrider-files")

    async def drain(self) -> None:
        """Take no more requests; those in hand go on."""
        self._is_draining = True
        self.replicas.drain()
        await self._tell_state()

    async def stop(self) -> None:
        await self.replicas.stop()
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self.preparing.close()
        self._templating.close()
        self._templates.close()
        self.bodies.close()
        self.tokenizers.close()

    async def _tell_state(self) -> None:
        for hear in self.on_state:
            await hear(self.state)

    async def _hear_change(self) -> None:
        """What is served is what some engine has, as long as there is any."""
        found = [each.link.facts for each in self.replicas.connected if each.link.facts]
        async with self._learning:
            if found and self._served is not None:
                models = map(model_of, found)
                if model_of(self._served.facts) not in models:
                    await self._learn(found[0])
        await self._tell_state()

    async def _meet(self, facts: EngineFacts) -> None:
        """Learn what an engine serves, unless there are others that serve something else."""
        async with self._learning:
            served = self._served
            is_same = served is not None and model_of(served.facts) == model_of(facts)
            if is_same or not self.replicas.connected or served is None:
                await self._learn(facts)
                return
        logger.warning(
            "a replica has the model %s, which is not used while others have %s",
            facts.settings["target.model"],
            served.facts.settings["target.model"],
        )

    async def _learn(self, facts: EngineFacts) -> None:
        if self._served is None or self._served.facts != facts:
            self._served = await asyncio.to_thread(
                Served.learn, facts, self.tokenizers, self._templates, self._chat_template
            )

    # -- requests -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def admitted(
        self, caller: Caller, owner: str, *, protocol: str = "grpc", label: str = ""
    ) -> Iterator[tuple[Admission, Upload]]:
        """A call, charged to its key before anything of its body is read. `owner` is the client
        that the body counts for where there are no keys."""
        with contextlib.ExitStack() as stack:
            try:
                self._serving("")  # what cannot be answered costs nothing
                self.in_hand.check_room(caller.name, self.limits.share_of(self.config.max_requests))
                admission = stack.enter_context(self.limits.admitted(caller))
            except OutriderError:
                with self._refusals(caller, protocol, label):
                    raise
            if caller.name:
                admission.count = self._refusals(caller, protocol, label)(admission.count)
            yield admission, stack.enter_context(self.reading.upload(caller.name or owner))

    @contextlib.contextmanager
    def _refusals(self, caller: Caller, protocol: str, label: str) -> Iterator[None]:
        """Errors from inside are counted and logged as that of a request."""
        try:
            yield
        except OutriderError:
            call = Call("", {}, caller, protocol=protocol, label=label)
            with RequestWatch(call, self.model, self.metrics, self._access_log):
                raise

    @contextlib.asynccontextmanager
    async def session(self, call: Call) -> AsyncIterator[Session]:
        """A checked request, ready to run; its id is taken until the context is left."""
        with RequestWatch(call, self.model, self.metrics, self._access_log) as watch:
            async with self._checked(call) as session:
                yield watch.begin(session)

    @contextlib.asynccontextmanager
    async def _checked(self, call: Call) -> AsyncIterator[Session]:
        served = self._serving(call.model)
        params = await self._params(call)
        bounds.check_params(params, self.config)
        call.caller.check_priority(call.priority)
        most = self.limits.share_of(self.config.max_requests)
        late_s = time.monotonic() + self.config.queue_timeout_s
        may_share, key = call.resumption is not None, call.caller.name
        with self.in_hand.taken(key, call.request_id, most, may_share=may_share) as request_id:
            prepared = await self._prepared(served, request_id, call, params)
            bounds.check_prepared(prepared.spec, self.config)
            if call.protocol == "http":
                asked = call.params.get("max_tokens")
                bounds.check_context(prepared.spec, asked, served.facts.max_model_len)
            session = self._session(served, call, prepared)
            if call.resumption is not None:
                await self.preparing.run(
                    call.owner, call.deadline_s, session.take_up, call.resumption
                )
                self.metrics.resume(self.model, CLIENT_BACK)
            call.release()
            call.admission.read(len(prepared.spec.prompt_ids), session.num_generated)
            session.may_be_left = call.admission.may_be_left
            with bounds.waits_until(late_s, session, self.config), self.in_hand.running(session):
                yield session

    async def _params(self, call: Call) -> SamplingParams:
        defaults, given = self._defaults(call), call.params
        allowed = given.get("allowed_token_ids")
        # Whether it is a list at all is checked with all other types, by `SamplingParams`.
        if not isinstance(allowed, Sized) or len(allowed) <= MAX_INLINE_ENTRIES:
            return with_defaults(given, defaults)
        # Checking millions of entries would hold up every stream.
        return await self.preparing.run(call.owner, call.deadline_s, with_defaults, given, defaults)

    def _session(self, served: Served, call: Call, prepared: PreparedRequest) -> Session:
        resume_id, token = self._resumed_by(call, prepared.spec.seed)
        return Session(
            prepared,
            served.facts,
            served.tokenizer,
            self.replicas,
            self._patience_s(served),
            resume_id if call.resumable else "",
            token,
        )

    def fail(self, error: Exception) -> None:
        """A request ended by an error that was not expected, by a fault of the server's own."""
        self.metrics.fail(self.model)
        self._quiet_log.exception("a request failed", error)

    async def release(self, token: str, caller: Caller) -> bool:
        """End a resumable request for good; whether it was there."""
        resume_id = self.resume_tokens.resume_id(token, caller.name)
        for link in await self.replicas.holders():
            with contextlib.suppress(UnavailableError):
                if await link.attach(resume_id, (), lambda event: None):
                    return True
        return False

    def _resumed_by(self, call: Call, seed: int) -> tuple[str, str]:
        """Under which the engine may keep the request, and with which its client may resume it."""
        if not call.digest:
            return "", ""
        resume_id = call.resumption.resume_id if call.resumption else new_resume_id()
        return resume_id, self.resume_tokens.make(resume_id, call.caller.name, call.digest, seed)

    def _defaults(self, call: Call) -> dict[str, Any]:
        """What a request gets that it does not ask for."""
        defaults: dict[str, Any] = {}
        if isinstance(call.prompt, Conversation):
            defaults["max_tokens"] = None  # an answer ends where its author ends it
        return defaults | self.sampling_defaults

    async def tokenize(
        self,
        owner: str,
        prompt: str | Conversation,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        deadline_s: float | None = None,
    ) -> list[int]:
        """The ids of a text or a conversation, as a request with it would read it."""
        served = self._serving(model)
        return await self._preparing_of(prompt).run(
            owner, deadline_s, served.tokenize, prompt, add_special_tokens
        )

    async def detokenize(
        self,
        owner: str,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        deadline_s: float | None = None,
    ) -> str:
        """The text of ids."""
        served = self._serving(model)
        return await self.preparing.run(
            owner,
            deadline_s,
            served.front_door.detokenize,
            token_ids,
            skip_special_tokens=skip_special_tokens,
        )

    async def _prepared(
        self, served: Served, request_id: str, call: Call, params: SamplingParams
    ) -> PreparedRequest:
        preparing = self._preparing_of(call.prompt)
        sharing = served.config.cache.prefix_sharing
        salt = self._tenants.cache_salt(call.caller, call.cache_salt, sharing)
        tenant = self._tenants.tenant(call.caller)
        # Settled here and now: preparations may overtake each other, arrivals do not.
        if call.resumption is not None:
            seed = call.resumption.seed
        else:
            seed = served.front_door.settle_seed(params)
        return await preparing.run(
            call.owner,
            call.deadline_s,
            served.prepare,
            request_id,
            call,
            params,
            seed,
            salt,
            tenant,
        )

    def _preparing_of(self, prompt: Prompt | Conversation) -> Preparing:
        """Where it is made ready: a client's template must hold up nobody without one."""
        if not isinstance(prompt, Conversation) or prompt.template is None:
            return self.preparing
        if not self.config.allow_client_templates:
            raise RequestError(
                "the conversation brings a template, which this server does not run; leave "
                "it out, or have the server set server.allow_client_templates to true."
            )
        return self._templating

    def _serving(self, model: str) -> Served:
        match self.state, self._served:
            case State.SERVING, Served() as served:
                if model and model not in self.models:
                    names = " or ".join(map(repr, self.models))
                    raise UnknownModelError(
                        f"model is {model!r}, which is not served here; ask for {names} or leave "
                        "it out."
                    )
                return served
            case State.DRAINING, _:
                raise UnavailableError("the server is stopping; send the request to another.")
            case State.STARTING, _:
                raise UnavailableError("the engine is starting; try again in a moment.")
        raise UnavailableError("the engine is away and being restarted; try again in a moment.")

    def _patience_s(self, served: Served) -> float:
        if self._resubmit_timeout_s is not None:
            return self._resubmit_timeout_s
        return served.config.cluster.restart_timeout_s

    # -- what is known ------------------------------------------------------------------------

    @property
    def models(self) -> tuple[str, ...]:
        """The names the model is served under; none before there was an engine, unless they are
        configured."""
        if self.config.model_names or self._served is None:
            return self.config.model_names
        return self._served.names

    @property
    def model(self) -> str:
        """The first of them, or nothing."""
        return next(iter(self.models), "")

    @property
    def facts(self) -> EngineFacts | None:
        return None if self._served is None else self._served.facts

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What requests get of the checkpoint that leave it out, unless that is turned off."""
        if self._served is None:
            return {}
        return sampling_defaults(self._served.facts, self.config.generation_config)

    @property
    def has_chat_template(self) -> bool:
        return self._served is not None and self._served.front_door.has_chat_template

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def num_processes(self) -> int:
        """Gateways that share the ports, and with them the limits."""
        return self.limits.num_processes

    @num_processes.setter
    def num_processes(self, number: int) -> None:
        self.limits.num_processes = max(number, 1)
