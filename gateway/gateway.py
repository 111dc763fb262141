"""The gateway behind all protocols: links to the engines, active requests, limits and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import StrEnum
from typing import Any

from outrider.api_types.errors import UnavailableError, UnknownModelError
from outrider.config import ServerConfig
from outrider.errors import OutriderError
from outrider.gateway import bounds
from outrider.gateway.active_requests import ActiveRequests
from outrider.gateway.auth.callers import Caller, Callers
from outrider.gateway.auth.tls import TlsFiles
from outrider.gateway.auth.watched_files import poll_files
from outrider.gateway.body_parser import BodyParser
from outrider.gateway.calls import Call
from outrider.gateway.limits import Admission, Limits
from outrider.gateway.metrics.access_log import AccessLog
from outrider.gateway.metrics.request_watch import RequestWatch
from outrider.gateway.metrics.requests import CLIENT_BACK, GatewayMetrics
from outrider.gateway.preparation import Preparation
from outrider.gateway.resume import ResumeTokens, new_resume_id
from outrider.gateway.routing.replicas import ReplicaLinks
from outrider.gateway.served_model import ModelLoader, ServedModel, Tokenizers
from outrider.gateway.session import Session
from outrider.gateway.upload_budget import MAX_UPLOAD_BYTES, Upload, UploadBudget
from outrider.links.gateway_messages import EngineFacts
from outrider.rate_limited_log import RateLimitedLog
from outrider.text.chat import read_template
from outrider.text.defaults import sampling_defaults
from outrider.text.input_processor import PreparedRequest

logger = logging.getLogger(__name__)


class GatewayState(StrEnum):
    """Whether a gateway serves requests."""

    STARTING = "starting"  # no engine has connected yet
    SERVING = "serving"
    ENGINE_AWAY = "engine away"  # running requests wait, new ones are refused
    DRAINING = "draining"  # running requests finish, new ones are refused


class Gateway:
    """Keeps the links to the engines and turns calls into sessions.

    `secret` is shared by all processes of the server. Streams wait `resubmit_timeout_s` while there
    is no engine; by default, the engine's restart timeout. `on_state` are called at every change of
    state.
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
        self.tokenizers = Tokenizers()
        self._loader = ModelLoader(self.tokenizers, None if path is None else read_template(path))
        self.callers = Callers(config)
        self.limits = Limits(window_s=config.resume_window_s)
        self.tls = TlsFiles.of(config)
        self.metrics = GatewayMetrics()
        self._limited_log = RateLimitedLog(logger)
        self._access_log = AccessLog(with_prompts=config.log_prompts)
        self.replicas = ReplicaLinks(secret, self._on_connect, self._on_replicas_change)
        self.on_state: list[Callable[[GatewayState], Awaitable[None]]] = []
        self._resubmit_timeout_s = resubmit_timeout_s
        self._is_draining = False
        self._started_s = time.monotonic()
        self.active_requests = ActiveRequests()
        self.uploads = UploadBudget(max(MAX_UPLOAD_BYTES, 4 * config.max_body_bytes))
        self.preparation = Preparation(secret, config)
        self.body_parser = BodyParser(config)
        self.resume_tokens = ResumeTokens(secret)  # valid at every gateway of this server
        self._watching: asyncio.Task[None] | None = None

    # -- life cycle ---------------------------------------------------------------------------

    @property
    def state(self) -> GatewayState:
        if self._is_draining:
            return GatewayState.DRAINING
        if self._loader.served is None:
            return GatewayState.STARTING
        return GatewayState.SERVING if self.replicas.is_any_usable else GatewayState.ENGINE_AWAY

    def start(self) -> None:
        files = [each for each in (self.callers.watched, self.tls and self.tls.watched) if each]
        self._watching = asyncio.create_task(poll_files(files), name="outrider-files")

    async def drain(self) -> None:
        """Refuse new requests; active ones continue."""
        self._is_draining = True
        self.replicas.drain()
        await self._notify_state()

    async def stop(self) -> None:
        await self.replicas.stop()
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self.preparation.close()
        self.body_parser.close()
        self._loader.close()

    async def _notify_state(self) -> None:
        for callback in self.on_state:
            await callback(self.state)

    async def _on_replicas_change(self) -> None:
        await self._loader.on_change(self.replicas)
        await self._notify_state()

    async def _on_connect(self, facts: EngineFacts) -> None:
        await self._loader.on_connect(facts, self.replicas)

    # -- requests -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def admitted(
        self, caller: Caller, owner: str, *, protocol: str = "grpc", label: str = ""
    ) -> Iterator[tuple[Admission, Upload]]:
        """A call, charged to its key before its body is read. `owner` is the client that the body
        counts for where there are no keys."""
        with contextlib.ExitStack() as stack:
            try:
                self.serving("")  # unavailable: refused before it is charged
                self.active_requests.check_capacity(
                    caller.name, self.limits.share_of(self.config.max_requests)
                )
                admission = stack.enter_context(self.limits.admitted(caller))
            except OutriderError:
                with self._refusals(caller, protocol, label):
                    raise
            if caller.name:
                admission.count = self._refusals(caller, protocol, label)(admission.count)
            yield admission, stack.enter_context(self.uploads.upload(caller.name or owner))

    @contextlib.contextmanager
    def _refusals(self, caller: Caller, protocol: str, label: str) -> Iterator[None]:
        """Count and log an error raised inside as a refused request."""
        try:
            yield
        except OutriderError:
            call = Call("", {}, caller, protocol=protocol, label=label)
            with RequestWatch(call, self.model, self.metrics, self._access_log):
                raise

    @contextlib.asynccontextmanager
    async def session(self, call: Call) -> AsyncIterator[Session]:
        """A checked request, ready to run; its id is reserved until the context is left."""
        with RequestWatch(call, self.model, self.metrics, self._access_log) as watch:
            async with self._checked(call) as session:
                yield watch.begin(session)

    @contextlib.asynccontextmanager
    async def _checked(self, call: Call) -> AsyncIterator[Session]:
        served = self.serving(call.model)
        params = await self.preparation.params(served, call)
        bounds.check_params(params, self.config)
        call.caller.check_priority(call.priority)
        limit = self.limits.share_of(self.config.max_requests)
        late_s = time.monotonic() + self.config.queue_timeout_s
        may_share, key = call.resumption is not None, call.caller.name
        with self.active_requests.claimed(
            key, call.request_id, limit, may_share=may_share
        ) as request_id:
            prepared = await self.preparation.prepare(served, request_id, call, params)
            bounds.check_prepared(prepared.spec, self.config)
            if call.protocol == "http":
                max_tokens = call.params.get("max_tokens")
                bounds.check_context(prepared.spec, max_tokens, served.facts.max_model_len)
            session = self._session(served, call, prepared)
            if call.resumption is not None:
                await self.preparation.pool.run(
                    call.owner, call.deadline_s, session.restore, call.resumption
                )
                self.metrics.resume(self.model, CLIENT_BACK)
            call.release()
            output = session.output
            call.admission.read(len(output.prompt_token_ids), lambda: output.num_generated)
            with (
                bounds.queue_timeout(late_s, session, self.config),
                self.active_requests.running(session),
            ):
                yield session

    def _session(self, served: ServedModel, call: Call, prepared: PreparedRequest) -> Session:
        resume_id, token = self._resumed_by(call, prepared.spec.seed)
        return Session(
            prepared,
            served.facts,
            served.tokenizer,
            self.replicas,
            self._resubmit_timeout_of(served),
            resume_id if call.resumable else "",
            token,
            call.admission.may_detach,
        )

    def fail(self, error: Exception) -> None:
        """Count and log an unexpected error, an internal one."""
        self.metrics.fail(self.model)
        self._limited_log.exception("a request failed", error)

    async def release(self, token: str, caller: Caller) -> bool:
        """End a resumable request for good; returns whether an engine held it."""
        resume_id = self.resume_tokens.resume_id(token, caller.name)
        for link in await self.replicas.holders():
            with contextlib.suppress(UnavailableError):
                if await link.attach(resume_id, (), lambda event: None):
                    return True
        return False

    def _resumed_by(self, call: Call, seed: int) -> tuple[str, str]:
        """The id under which an engine holds the request, and the client's token to resume it."""
        if not call.digest:
            return "", ""
        resume_id = call.resumption.resume_id if call.resumption else new_resume_id()
        return resume_id, self.resume_tokens.make(resume_id, call.caller.name, call.digest, seed)

    def serving(self, model: str) -> ServedModel:
        """The model that a new request runs on; `model` is the name in the request, or ""."""
        match self.state, self._loader.served:
            case GatewayState.SERVING, ServedModel() as served:
                if model and model not in self.models:
                    names = " or ".join(map(repr, self.models))
                    raise UnknownModelError(
                        f"model is {model!r}, which is not served here; send {names} or leave "
                        "it out."
                    )
                return served
            case GatewayState.DRAINING, _:
                raise UnavailableError("the server is stopping; send the request to another.")
            case GatewayState.STARTING, _:
                raise UnavailableError("the engine is starting; try again in a moment.")
        raise UnavailableError("the engine is away and being restarted; try again in a moment.")

    def _resubmit_timeout_of(self, served: ServedModel) -> float:
        if self._resubmit_timeout_s is not None:
            return self._resubmit_timeout_s
        return served.config.cluster.restart_timeout_s

    # -- facts --------------------------------------------------------------------------------

    @property
    def models(self) -> tuple[str, ...]:
        """The names the model is served under; unless configured, none before the first engine."""
        if self.config.model_names or self._loader.served is None:
            return self.config.model_names
        return self._loader.served.names

    @property
    def model(self) -> str:
        """The first of them, or ""."""
        return next(iter(self.models), "")

    @property
    def facts(self) -> EngineFacts | None:
        return None if self._loader.served is None else self._loader.served.facts

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The checkpoint's sampling defaults, unless turned off."""
        if self._loader.served is None:
            return {}
        return sampling_defaults(self._loader.served.facts, self.config.generation_config)

    @property
    def has_chat_template(self) -> bool:
        return (
            self._loader.served is not None
            and self._loader.served.input_processor.has_chat_template
        )

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def num_processes(self) -> int:
        """Gateway processes that share the ports, and the limits."""
        return self.limits.num_processes

    @num_processes.setter
    def num_processes(self, number: int) -> None:
        self.limits.num_processes = max(number, 1)
