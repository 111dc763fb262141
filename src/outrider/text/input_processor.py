"""Turns a prompt and its parameters into a `RequestSpec` for the scheduler, or raises a
`RequestError`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from outrider.catalog.proposers import traits
from outrider.config import EngineConfig
from outrider.errors import ContextLengthError, RequestError
from outrider.kernels.seeds import sample_seed
from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import OFF, SamplingParams, check_priority
from outrider.scheduler.types import NO_PROPOSER, RequestSpec
from outrider.text.chat import ChatTemplate
from outrider.text.messages import Conversation
from outrider.text.prompts import Prompt
from outrider.text.stop_automaton import StopAutomaton
from outrider.text.templates import TemplateProcesses
from outrider.text.token_sizes import token_sizes
from outrider.text.tokenizer import Tokenizer

ProcessorInput: TypeAlias = Prompt | Conversation

_CHARS_PER_TOKEN = 4  # for a first estimate of the prefix to tokenize
_LAST_WORD_TOKENS = 64  # by which a prefix that cuts a word in two may be too long


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request: its spec for the scheduler, and what its output text needs."""

    request_id: str
    spec: RequestSpec
    prompt: str | None  # None if it came as ids or as a conversation
    stops: StopAutomaton
    echo: str  # the prefix of each output text
    deadline_s: float | None = None


class InputProcessor:
    """Checks requests against one engine's models and limits. Thread-safe.

    `chat_template` replaces the model's own. `ChatTemplate` says which templates run in
    `processes`.
    """

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        processes: TemplateProcesses | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._config = EngineConfig.from_settings(facts.settings)
        self._facts = facts
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer, chat_template, processes)
        self._token_sizes = None
        if tokenizer is not None:
            self._token_sizes = token_sizes(tokenizer)
            # The first call clears truncation and padding set by the checkpoint; later it would
            # race with other threads.
            tokenizer.encode("")
        self._num_seedless = 0

    def prepare(
        self,
        request_id: str,
        prompt: ProcessorInput,
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        seed: int | None = None,
        cache_salt: str = "",
        tenant: str = "",
    ) -> PreparedRequest:
        """`seed` is a result of `settle_seed`; without it, `prepare` calls that."""
        check_priority(priority)
        text, ids = self._prompt(prompt)
        self._check_tokens(ids)
        self._check_token_ids(params)
        if params.echo and params.logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=params.logprobs)
        proposer, depth = self._speculation(params)
        room = self._facts.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = () if params.ignore_eos else self._facts.eos_ids
        spec = RequestSpec(
            prompt_ids=tuple(ids),
            params=params,
            seed=self.settle_seed(params) if seed is None else seed,
            max_len=len(ids) + max_tokens,
            stop_ids=tuple({*ends, *params.stop_token_ids}),
            bad_word_ids=self._bad_word_ids(params),
            proposer=proposer,
            depth=depth,
            is_depth_fixed=params.fix_depth and proposer != NO_PROPOSER,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        echo = self._echo(text, ids) if params.echo else ""
        return PreparedRequest(
            request_id, spec, text, StopAutomaton(params.stop or ()), echo, deadline_s
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat.exists

    def tokenize(self, prompt: str | Conversation, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt; the chat template decides a conversation's special tokens."""
        if isinstance(prompt, Conversation):
            text = self._chat.render(
                prompt.messages,
                prompt.template,
                prompt.add_generation_prompt,
                prompt.template_kwargs,
            )
            return self._encode(text, add_special_tokens=False)
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer; there is nothing to read text with.")
        return self._encode(prompt, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of at most `max_model_len` token ids."""
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer; there is nothing to write text with.")
        limit = self._facts.max_model_len
        if len(token_ids) > limit:
            raise RequestError(
                f"token_ids has {len(token_ids)} entries; it may have {limit} (max_model_len), so "
                "ask for parts."
            )
        ids = list(token_ids)
        self._check_ids("token_ids", ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def settle_seed(self, params: SamplingParams) -> int:
        """The seed of a request; without one, the next of the engine's seed, or a random one."""
        if params.seed is not None:
            return params.seed % 2**64
        if self._config.seed is None:
            return secrets.randbits(64)
        self._num_seedless += 1
        return sample_seed(self._config.seed % 2**64, self._num_seedless)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt; one that cannot fit is rejected without tokenizing all of it."""
        assert self._tokenizer is not None
        sizes, limit = self._token_sizes, self._facts.max_model_len - 1
        if sizes is not None and (count := sizes.min_tokens(text)) > limit:
            raise self._too_long(f"{len(text)} characters, which are at least {count} tokens")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds half a character ({text[error.start]!r}) at {error.start}; "
                "give whole ones."
            ) from None
        self._check_prefixes(text, limit)
        return self._ids(text, add_special_tokens=add_special_tokens)

    def _check_prefixes(self, text: str, limit: int) -> None:
        """Reject a far too long text by a prefix: tokenizing all of it may take seconds."""
        size = _CHARS_PER_TOKEN * limit
        while size < len(text):
            count = len(self._ids(text[:size], add_special_tokens=False))
            if count > limit + _LAST_WORD_TOKENS:
                raise self._too_long(
                    f"{len(text)} characters, the first {size} of which are {count} tokens"
                )
            size *= 2

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None
        # Not verbose: a too long prompt is the client's error, not a log line.
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded)

    def _prompt(self, prompt: ProcessorInput) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"}
            if len(prompt) != 1 or not known.issuperset(prompt):
                raise RequestError(
                    f"a prompt given as a mapping has the keys {sorted(prompt)}; it must have "
                    "either 'prompt' or 'prompt_token_ids'."
                )
            return self._prompt(next(iter(prompt.values())))
        if isinstance(prompt, Conversation):
            return None, self.tokenize(prompt)
        if not isinstance(prompt, Sequence):
            raise RequestError(f"the prompt is {prompt!r}; it must be text or a list of token ids.")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    "the prompt is text but the model has no tokenizer; "
                    "give {'prompt_token_ids': [...]} instead."
                )
            return prompt, self._encode(prompt)
        self._check_length(len(prompt))  # before any work per token
        return None, list(prompt)

    def _echo(self, text: str | None, ids: list[int]) -> str:
        if text is not None or self._tokenizer is None:
            return text or ""
        decoded: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return decoded

    def _check_tokens(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty; give at least one token.")
        self._check_length(len(ids))
        self._check_ids("the prompt", ids)

    def _check_ids(self, holder: str, ids: list[int]) -> None:
        vocab_size = self._facts.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(
                    f"{holder} holds {token!r}; token ids must be from 0 to {vocab_size - 1}."
                )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._facts.max_model_len:
            raise self._too_long(f"{num_tokens} input tokens")

    def _too_long(self, size: str) -> ContextLengthError:
        limit = self._facts.max_model_len
        return ContextLengthError(
            limit,
            f"your prompt contains {size}; shorten it to {limit - 1} tokens or fewer, or have the "
            "server raise max_model_len.",
        )

    def _check_token_ids(self, params: SamplingParams) -> None:
        vocab_size = self._facts.vocab_size
        num_allowed = len(params.allowed_token_ids or ())
        if num_allowed > vocab_size:
            raise RequestError(
                f"allowed_token_ids has {num_allowed} entries; there are {vocab_size} tokens, "
                "so name each once."
            )
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(
                        f"{name} names token {token}; ids must be under {vocab_size}."
                    )
        for name, words in (("bad_words", params.bad_words), ("stop", params.stop)):
            if words and self._tokenizer is None:
                raise RequestError(f"{name} needs a tokenizer; the model has none, leave it out.")

    def _speculation(self, params: SamplingParams) -> tuple[str, int]:
        """The request's proposer and its maximum depth."""
        method = params.speculation or self._config.method or OFF
        depth = params.num_speculative_tokens
        if depth is None:
            depth = self._facts.depth
        if method == OFF:
            return NO_PROPOSER, 0
        facts = self._facts
        available = [each.name for each in traits(has_draft_model=facts.has_draft, head=facts.head)]
        if method not in available:
            choices = " or ".join(map(repr, [*available, OFF]))
            has_model = "" if facts.has_draft or facts.head else ", which has no draft model"
            raise RequestError(
                f"speculation is {method!r}, which this engine{has_model} does not offer; "
                f"choose {choices}."
            )
        return method, depth

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word with and without a leading space: tokenizers encode these differently."""
        if not params.bad_words or self._tokenizer is None:
            return ()
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for spelling in (word, " " + word.lstrip()):
                ids = self._tokenizer.encode(spelling, add_special_tokens=False)
                found[tuple(ids)] = None
        return tuple(found)
