"""An engine inside the client's own process: what is left when no server stands between."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from outrider.bench.load.asks import Ask
from outrider.bench.load.records import CountedBy, Speculated
from outrider.bench.load.targets.base import Reply, TargetFault, TargetSpec
from outrider.bench.load.targets.rounds import add_counts, rounds_by_accepted
from outrider.config import EngineConfig
from outrider.engine.async_engine import AsyncEngine
from outrider.errors import CapacityError, ConfigError, EngineDeadError, OutriderError, RequestError
from outrider.scheduler.params import SamplingParams
from outrider.text.front_door import Prompt
from outrider.text.outputs import OutputDelta, RequestOutput

_MAX_MESSAGE_CHARS = 300


class InProcessTarget:
    """`inprocess:?model=...&draft_model=...`: options of `LLM`. All requests share the engine.

    Every client process has an engine of its own, so measure it with one.
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

    async def send(self, ask: Ask, reply: Reply) -> None:
        engine = self._engine
        if engine is None:
            raise TargetFault("closed", "the target was closed")
        reply.counted_by = CountedBy.IDS
        reply.sending()
        try:
            params = self._params(ask)
            prompt = _prompt_of(engine, ask)
            # Closed here, not when it is collected: that is what cancels the request.
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

    def _params(self, ask: Ask) -> SamplingParams:
        values: dict[str, Any] = {
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "ignore_eos": ask.ignores_eos,
            "seed": ask.seed,
        }
        return SamplingParams.from_mapping(values | dict(self._spec.extras))


def _options_of(url: str) -> dict[str, Any]:
    """Values are written as in YAML, so that numbers and truth values are none of text."""
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


def _prompt_of(engine: AsyncEngine, ask: Ask) -> Prompt:
    if ask.messages:
        said = [{"role": m.role, "content": m.content} for m in ask.messages]
        return engine.engine.front_door.chat_prompt(said)
    return ask.token_ids if ask.token_ids is not None else ask.text or ""


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
    told = reply.speculated = Speculated()
    for sample in output.outputs:
        told.rounds += sample.speculation.rounds
        told.drafted += sample.speculation.drafted
        told.accepted += sample.speculation.accepted
        add_counts(told.rounds_by_accepted, rounds_by_accepted(sample.speculation.drafted_by_token))


def _kind_of(error: OutriderError) -> str:
    match error:
        case RequestError():
            return "invalid argument"
        case CapacityError():
            return "resource exhausted"
        case EngineDeadError():
            return "unavailable"
    return "internal"
