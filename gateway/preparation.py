"""Prepares calls off the event loop, on threads shared fairly among keys."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from outrider.config import ServerConfig
from outrider.errors import RequestError
from outrider.gateway.auth.tenants import TenantIds
from outrider.gateway.calls import Call
from outrider.gateway.fair_pool import FairThreadPool
from outrider.gateway.served_model import ServedModel
from outrider.scheduler.params import SamplingParams
from outrider.text.defaults import sampling_defaults, with_defaults
from outrider.text.input_processor import PreparedRequest, ProcessorInput
from outrider.text.messages import Conversation

# A usual prompt takes milliseconds, so a full queue is seconds long.
PREPARING_THREADS, MAX_PREPARING = 4, 512
# Clients' templates may take seconds; in their own pool they delay only each other.
TEMPLATE_THREADS, MAX_TEMPLATES = 2, 16
# Token ids of a request that are checked on the event loop.
MAX_INLINE_ENTRIES = 10_000


class Preparation:
    """Settles the parameters of calls and tokenizes their prompts. `pool` is for other work on
    requests, too."""

    def __init__(self, secret: str, config: ServerConfig) -> None:
        self.pool = FairThreadPool("prepare", PREPARING_THREADS, MAX_PREPARING)
        self._template_pool = FairThreadPool("template", TEMPLATE_THREADS, MAX_TEMPLATES)
        self._config = config
        self._tenants = TenantIds(secret)

    def close(self) -> None:
        self.pool.close()
        self._template_pool.close()

    async def params(self, served: ServedModel, call: Call) -> SamplingParams:
        """The call's parameters over the model's defaults."""
        defaults: dict[str, Any] = {}
        if isinstance(call.prompt, Conversation):
            defaults["max_tokens"] = None  # chat: until EOS
        defaults |= sampling_defaults(served.facts, self._config.generation_config)
        allowed = call.params.get("allowed_token_ids")
        # `SamplingParams` checks that it is a list.
        if not isinstance(allowed, Sized) or len(allowed) <= MAX_INLINE_ENTRIES:
            return with_defaults(call.params, defaults)
        # Off the event loop: checking millions of entries would block every stream.
        return await self.pool.run(
            call.owner, call.deadline_s, with_defaults, call.params, defaults
        )

    async def prepare(
        self, served: ServedModel, request_id: str, call: Call, params: SamplingParams
    ) -> PreparedRequest:
        pool = self._pool_for(call.prompt)
        sharing = served.config.cache.prefix_sharing
        salt = self._tenants.cache_salt(call.caller, call.cache_salt, sharing)
        # Drawn here, in order of arrival: preparations may overtake each other.
        if call.resumption is not None:
            seed = call.resumption.seed
        else:
            seed = served.input_processor.settle_seed(params)
        return await pool.run(
            call.owner,
            call.deadline_s,
            served.input_processor.prepare,
            request_id,
            call.prompt,
            params,
            priority=call.priority,
            deadline_s=call.deadline_s,
            seed=seed,
            cache_salt=salt,
            tenant=self._tenants.tenant(call.caller),
        )

    async def tokenize(
        self,
        served: ServedModel,
        owner: str,
        prompt: str | Conversation,
        *,
        add_special_tokens: bool = True,
        deadline_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text or a conversation, as generation would see them."""
        return await self._pool_for(prompt).run(
            owner,
            deadline_s,
            served.input_processor.tokenize,
            prompt,
            add_special_tokens=add_special_tokens,
        )

    async def detokenize(
        self,
        served: ServedModel,
        owner: str,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        deadline_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        return await self.pool.run(
            owner,
            deadline_s,
            served.input_processor.detokenize,
            token_ids,
            skip_special_tokens=skip_special_tokens,
        )

    def _pool_for(self, prompt: ProcessorInput) -> FairThreadPool:
        """The pool that prepares it: clients' templates must not delay other requests."""
        if not isinstance(prompt, Conversation) or prompt.template is None:
            return self.pool
        if not self._config.allow_client_templates:
            raise RequestError(
                "the conversation has a template, which this server does not run; leave "
                "it out, or have the server set server.allow_client_templates to true."
            )
        return self._template_pool
