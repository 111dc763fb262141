"""An engine's model from the gateway's side: what turns prompts into requests and ids into text."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.errors import ModelError
from outrider.gateway.calls import Call
from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import SamplingParams
from outrider.text.front_door import FrontDoor, PreparedRequest
from outrider.text.messages import Conversation
from outrider.text.templates import TemplateProcesses
from outrider.text.tokenizer import Tokenizer, base_name, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """Its methods take long for long prompts, so they are for threads."""

    facts: EngineFacts
    config: EngineConfig  # the engine's
    tokenizer: Tokenizer | None
    front_door: FrontDoor
    names: tuple[str, ...]  # of the model, where none are configured

    @classmethod
    def learn(
        cls,
        facts: EngineFacts,
        tokenizers: Tokenizers,
        templates: TemplateProcesses,
        chat_template: str | None,
    ) -> Served:
        config = EngineConfig.from_settings(facts.settings)
        tokenizer = tokenizers.load(config)
        front_door = FrontDoor(facts, tokenizer, templates, chat_template)
        name = str(facts.settings["target.model"])
        names = tuple(dict.fromkeys((name, base_name(name) or name)))
        return cls(facts, config, tokenizer, front_door, names)

    def prepare(
        self,
        request_id: str,
        call: Call,
        params: SamplingParams,
        seed: int,
        cache_salt: str,
        tenant: str,
    ) -> PreparedRequest:
        prompt = call.prompt
        return self.front_door.prepare(
            request_id,
            self._chat_prompt(prompt) if isinstance(prompt, Conversation) else prompt,
            params,
            priority=call.priority,
            deadline_s=call.deadline_s,
            seed=seed,
            cache_salt=cache_salt,
            tenant=tenant,
        )

    def tokenize(self, prompt: str | Conversation, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, Conversation):
            return self._chat_prompt(prompt)["prompt_token_ids"]
        return self.front_door.tokenize(prompt, add_special_tokens=add_special_tokens)

    def _chat_prompt(self, chat: Conversation) -> dict[str, list[int]]:
        return self.front_door.chat_prompt(
            chat.messages, chat.template, chat.add_generation_prompt, chat.template_kwargs
        )


class Tokenizers:
    """Loads an engine's tokenizer, which takes a while: the first may be loaded before its engine
    is there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._ahead: dict[tuple[str, str | None], Future[Tokenizer | None]] = {}

    def expect(self, config: EngineConfig) -> None:
        """An engine with this configuration is on its way."""
        loading = self._thread.submit(_tokenizer_of, config)
        self._ahead = {config.target.tokenizer_source: loading}

    def load(self, config: EngineConfig) -> Tokenizer | None:
        # Once: by the next time its files may be others.
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
