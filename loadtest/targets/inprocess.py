"""Target for an engine inside the client process: measures without a server."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from outrider.config import EngineConfig
from outrider.engine.async_engine import AsyncEngine
from outrider.errors import CapacityError, ConfigError, EngineDeadError, OutriderError, RequestError
from outrider.loadtest.records import CountedBy, RequestSpeculation
from outrider.loadtest.requests import BenchRequest
from outrider.loadtest.targets.base import Reply, TargetFault, TargetSpec
from outrider.loadtest.targets.rounds import add_counts, rounds_by_accepted
from outrider.scheduler.params import SamplingParams
from outrider.text.input_processor import ProcessorInput
from outrider.text.messages import Conversation
from outrider.text.outputs import OutputDelta, RequestOutput

_MAX_MESSAGE_CHARS = 300


class InProcessTarget:
    """`inprocess:?model=...&draft_model=...`: options of `LLM`. All requests share the engine.

    Every client process has its own engine, so measure with one process.
    """

    outlives_shifts = True

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        options = _options_of(spec.url)
        if spec.model is not None:
            options.setdefault("model", spec.model)
        self._config = EngineConfig.from_kwargs(**options)
        try:
            SamplingParams.from_mapping(spec.extras)
        except OutriderError as error:
            raise ConfigError(f"the extras of {spec.url} are wrong: {error}") from None
        self._engine: AsyncEngine | None = None
        self._ids = itertools.count()

    async def open(self) -> None:
        self._engine = await asyncio.to_thread(AsyncEngine.from_config, self._config)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)

    async def send(self, request: BenchRequest, reply: Reply) -> None:
        engine = self._engine
        if engine is None:
            raise TargetFault("closed", "the target was closed")
        reply.counted_by = CountedBy.IDS
        reply.sending()
        try:
            params = self._params(request)
            prompt = _prompt_of(request)
            # Closing the generator cancels the request; do not leave that to garbage collection.
            async with aclosing(
                engine.generate(f"load-{next(self._ids)}", prompt, params)  # type: ignore[type-var]
            ) as deltas:
                output = None
                async for delta in deltas:
                    output = delta.output
                    _take(delta, reply)
        except OutriderError as error:
            raise TargetFault(_kind_of(error), str(error)[:_MAX_MESSAGE_CHARS]) from None
        if output is not None:
            _settle(output, reply)

    def _params(self, request: BenchRequest) -> SamplingParams:
        values: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignores_eos,
            "seed": request.seed,
        }
        return SamplingParams.from_mapping(values | dict(self._spec.extras))


def _options_of(url: str) -> dict[str, Any]:
    """Parses values as YAML, so that numbers and booleans are not text."""
    parts = urlsplit(url)
    if parts.netloc or parts.path:
        raise ConfigError(
            f"the target {url!r} names more than options; give inprocess:?model=NAME&OPTION=VALUE."
        )
    try:
        pairs = parse_qsl(parts.query, strict_parsing=bool(parts.query))
        return {name: yaml.safe_load(value) for name, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the options of {url!r} cannot be read ({error}); give ?OPTION=VALUE&OPTION=VALUE."
        ) from None


def _prompt_of(request: BenchRequest) -> ProcessorInput:
    if request.messages:
        return Conversation([{"role": m.role, "content": m.content} for m in request.messages])
    return request.token_ids if request.token_ids is not None else request.text or ""


def _take(delta: OutputDelta, reply: Reply) -> None:
    if delta.token_ids:
        reply.update(len(delta.token_ids))
        reply.token_ids += delta.token_ids
    if delta.text:
        reply.pieces.append(delta.text)
    if delta.finish_reason is not None:
        reply.finish = delta.finish_reason.value


def _settle(output: RequestOutput, reply: Reply) -> None:
    reply.prompt_tokens = len(output.prompt_token_ids)
    reply.cached_tokens = output.metrics.num_cached_tokens
    speculation = reply.speculated = RequestSpeculation()
    for sample in output.outputs:
        speculation.rounds += sample.speculation.rounds
        speculation.drafted += sample.speculation.drafted
        speculation.accepted += sample.speculation.accepted
        add_counts(
            speculation.rounds_by_accepted, rounds_by_accepted(sample.speculation.drafted_by_token)
        )


def _kind_of(error: OutriderError) -> str:
    match error:
        case RequestError():
            return "invalid argument"
        case CapacityError():
            return "resource exhausted"
        case EngineDeadError():
            return "unavailable"
    return "internal"
