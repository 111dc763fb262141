"""The model that a gateway serves: that of the connected engines."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.errors import ModelError
from outrider.gateway.routing.replicas import ReplicaLinks, model_of
from outrider.links.gateway_messages import EngineFacts
from outrider.text.input_processor import InputProcessor
from outrider.text.templates import TemplateProcesses
from outrider.text.tokenizer import Tokenizer, base_name, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts, tokenizer and input processor of an engine's model."""

    facts: EngineFacts
    config: EngineConfig  # the engine's
    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    names: tuple[str, ...]  # of the model, where none are configured

    @classmethod
    def load(
        cls,
        facts: EngineFacts,
        tokenizers: Tokenizers,
        templates: TemplateProcesses,
        chat_template: str | None,
    ) -> ServedModel:
        config = EngineConfig.from_settings(facts.settings)
        tokenizer = tokenizers.load(config)
        input_processor = InputProcessor(facts, tokenizer, templates, chat_template)
        name = str(facts.settings["target.model"])
        names = tuple(dict.fromkeys((name, base_name(name) or name)))
        return cls(facts, config, tokenizer, input_processor, names)


class ModelLoader:
    """Loads the served model, and another one when no engine has it any more."""

    def __init__(self, tokenizers: Tokenizers, chat_template: str | None) -> None:
        self.served: ServedModel | None = None  # None before the first engine
        self._tokenizers = tokenizers
        self._templates = TemplateProcesses()
        self._chat_template = chat_template
        self._loading = asyncio.Lock()

    async def on_connect(self, facts: EngineFacts, replicas: ReplicaLinks) -> None:
        """Load the model of a new engine, unless other engines serve another model."""
        async with self._loading:
            served = self.served
            is_same = served is not None and model_of(served.facts) == model_of(facts)
            if is_same or not replicas.connected or served is None:
                await self._load(facts)
                return
        logger.warning(
            "a replica has the model %s; it gets no requests while others have %s",
            facts.settings["target.model"],
            served.facts.settings["target.model"],
        )

    async def on_change(self, replicas: ReplicaLinks) -> None:
        """Switch to a connected engine's model if no engine has the served one any more."""
        found = [each.link.facts for each in replicas.connected if each.link.facts]
        async with self._loading:
            if found and self.served is not None:
                models = map(model_of, found)
                if model_of(self.served.facts) not in models:
                    await self._load(found[0])

    def close(self) -> None:
        self._templates.close()
        self._tokenizers.close()

    async def _load(self, facts: EngineFacts) -> None:
        if self.served is None or self.served.facts != facts:
            self.served = await asyncio.to_thread(
                ServedModel.load, facts, self._tokenizers, self._templates, self._chat_template
            )


class Tokenizers:
    """Loads an engine's tokenizer; the first is loaded in the background while its engine
    starts."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._ahead: dict[tuple[str, str | None], Future[Tokenizer | None]] = {}

    def expect(self, config: EngineConfig) -> None:
        """Preload the tokenizer of an engine that is starting."""
        loading = self._thread.submit(_tokenizer_of, config)
        self._ahead = {config.target.tokenizer_source: loading}

    def load(self, config: EngineConfig) -> Tokenizer | None:
        # Used once: its files may have changed by the next time.
        loading = self._ahead.pop(config.target.tokenizer_source, None)
        return _tokenizer_of(config) if loading is None else loading.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    source, revision = config.target.tokenizer_source
    try:
        return load_tokenizer(source, revision=revision)
    except ModelError as error:
        logger.warning("%s Prompts must be token ids.", error)
        return None
