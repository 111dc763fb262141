"""What every protocol of the gateway shares: the engine behind it and the requests in hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from outrider.config import EngineConfig
from outrider.errors import CapacityError, ModelError, RequestError
from outrider.gateway.engine_link import EngineLink, Locate
from outrider.gateway.errors import RequestIdInUseError, UnavailableError, UnknownModelError
from outrider.gateway.preparing import Preparing
from outrider.gateway.session import Session
from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import SamplingParams
from outrider.text.front_door import FrontDoor, Message, PreparedRequest, Prompt
from outrider.text.templates import TemplateProcesses
from outrider.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128
# A prompt of ordinary length takes milliseconds, so the queue is seconds long at most.
PREPARING_THREADS, MAX_PREPARING = 4, 512
# Templates of clients take seconds if they mean harm, and then only hold up each other.
TEMPLATE_THREADS, MAX_TEMPLATES = 2, 16
_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_CHARS}}}")


class State(StrEnum):
    """What a gateway can do for a client."""

    STARTING = "starting"  # no engine has been there yet
    SERVING = "serving"
    ENGINE_AWAY = "engine away"  # running requests wait, new ones are refused
    DRAINING = "draining"  # running requests are finished, new ones are refused


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that is still to go through the chat template."""

    messages: Sequence[Message]
    template: str | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """A request as a client made it, of whatever protocol."""

    prompt: Prompt | Conversation
    params: SamplingParams
    model: str = ""
    request_id: str = ""
    priority: int = 0
    deadline_s: float | None = None  # on the clock of time.monotonic


@dataclass(frozen=True, slots=True)
class _Served:
    """An engine's models from the gateway's side."""

    facts: EngineFacts
    config: EngineConfig
    tokenizer: Tokenizer | None
    front_door: FrontDoor


class Gateway:
    """Keeps the link to the engine and turns calls into sessions.

    `served_name` is what clients call the model; the target as configured if it is not given.
    Streams wait `resubmit_timeout_s` for a lost engine; not given, as long as its restart may take.
    `on_state` hears of every change of state.
    """

    def __init__(
        self,
        locate: Locate,
        on_state: Callable[[State], Awaitable[None]],
        *,
        served_name: str | None = None,
        resubmit_timeout_s: float | None = None,
    ) -> None:
        self.link = EngineLink(locate, self._meet, self._tell_state)
        self._on_state = on_state
        self._served_name = served_name
        self._resubmit_timeout_s = resubmit_timeout_s
        self._served: _Served | None = None
        self._is_draining = False
        self._started_s = time.monotonic()
        self._active: set[str] = set()  # request ids
        self.preparing = Preparing("prepare", PREPARING_THREADS, MAX_PREPARING)
        self._templating = Preparing("template", TEMPLATE_THREADS, MAX_TEMPLATES)
        self._templates = TemplateProcesses()
        self._keeping: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._is_draining:
            return State.DRAINING
        if self._served is None:
            return State.STARTING
        return State.SERVING if self.link.connected else State.ENGINE_AWAY

    def start(self) -> None:
        self._keeping = asyncio.create_task(self.link.run(), name="outrider-engine-link")

    async def drain(self) -> None:
        """Take no more requests; those in hand go on."""
        self._is_draining = True
        await self._tell_state()

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        self.preparing.close()
        self._templating.close()
        self._templates.close()

    async def _tell_state(self) -> None:
        await self._on_state(self.state)

    async def _meet(self, facts: EngineFacts) -> None:
        """Learn what the engine serves, unless it is what the last one did."""
        if self._served is None or self._served.facts != facts:
            self._served = await asyncio.to_thread(self._learn, facts)

    def _learn(self, facts: EngineFacts) -> _Served:
        tokenizer = _tokenizer_of(facts)
        front_door = FrontDoor(facts, tokenizer, self._templates)
        return _Served(facts, EngineConfig.from_settings(facts.settings), tokenizer, front_door)

    # -- requests -----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def session(self, call: Call) -> AsyncIterator[Session]:
        """A checked request, ready to run; its id is taken until the context is left."""
        served = self._serving(call.model)
        most = served.config.server.max_requests
        if len(self._active) >= most:
            raise CapacityError(
                f"{most} requests are in hand already (server.max_requests); retry later."
            )
        request_id = self._claim_id(call.request_id)
        try:
            prepared = await self._prepared(served, request_id, call)
            yield Session(
                prepared,
                served.facts,
                served.tokenizer,
                self.link,
                self._patience_s(served),
            )
        finally:
            self._active.discard(request_id)

    async def _prepared(self, served: _Served, request_id: str, call: Call) -> PreparedRequest:
        preparing = self.preparing
        if isinstance(call.prompt, Conversation) and call.prompt.template is not None:
            if not served.config.server.allow_client_templates:
                raise RequestError(
                    "the conversation brings a template, which this server does not run; leave "
                    "it out, or have the server set server.allow_client_templates to true."
                )
            preparing = self._templating
        # Settled here and now: preparations may overtake each other, arrivals do not.
        seed = served.front_door.settle_seed(call.params)
        return await preparing.run(
            call.deadline_s, _prepare, served.front_door, request_id, call, seed
        )

    def _serving(self, model: str) -> _Served:
        match self.state, self._served:
            case State.SERVING, _Served() as served:
                if model not in ("", self.model):
                    raise UnknownModelError(
                        f"model is {model!r}, which is not served here; ask for {self.model!r} "
                        "or leave it out."
                    )
                return served
            case State.DRAINING, _:
                raise UnavailableError("the server is stopping; send the request to another.")
            case State.STARTING, _:
                raise UnavailableError("the engine is starting; try again in a moment.")
        raise UnavailableError("the engine is away and being restarted; try again in a moment.")

    def _patience_s(self, served: _Served) -> float:
        if self._resubmit_timeout_s is not None:
            return self._resubmit_timeout_s
        return served.config.cluster.restart_timeout_s

    def _claim_id(self, wanted: str) -> str:
        request_id = wanted or secrets.token_hex(8)
        if not _ID.fullmatch(request_id):
            raise RequestError(
                f"request_id is {wanted[:MAX_ID_CHARS]!r}; it must be at most {MAX_ID_CHARS} "
                "letters, digits and any of '._:-'."
            )
        if request_id in self._active:
            raise RequestIdInUseError(f"request_id {wanted!r} is in use; choose another.")
        self._active.add(request_id)
        return request_id

    # -- what is known ------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The name the model is served under; empty before there was an engine."""
        if self._served_name is not None or self._served is None:
            return self._served_name or ""
        return str(self._served.facts.settings["target.model"])

    @property
    def facts(self) -> EngineFacts | None:
        return None if self._served is None else self._served.facts

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def num_active(self) -> int:
        return len(self._active)


def _tokenizer_of(facts: EngineFacts) -> Tokenizer | None:
    settings = facts.settings
    try:
        return load_tokenizer(settings["target.model"], revision=settings.get("target.revision"))
    except ModelError as error:
        logger.warning("%s Prompts must be token ids.", error)
        return None


def _prepare(front_door: FrontDoor, request_id: str, call: Call, seed: int) -> PreparedRequest:
    prompt = call.prompt
    if isinstance(prompt, Conversation):
        prompt = front_door.chat_prompt(
            prompt.messages, prompt.template, prompt.add_generation_prompt
        )
    return front_door.prepare(
        request_id,
        prompt,
        call.params,
        priority=call.priority,
        deadline_s=call.deadline_s,
        seed=seed,
    )
