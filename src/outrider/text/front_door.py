"""The front door: a prompt and its parameters become the spec of a request that the scheduler can
run, or one sentence about why they cannot."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from outrider.config import EngineConfig
from outrider.errors import ContextLengthError, RequestError
from outrider.kernels.seeds import sample_seed
from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import OFF, SamplingParams, check_priority
from outrider.scheduler.types import NOBODY, RequestSpec
from outrider.text.chat import ChatTemplate
from outrider.text.messages import Message as Message
from outrider.text.stop_automaton import StopAutomaton
from outrider.text.templates import TemplateProcesses
from outrider.text.token_sizes import token_sizes
from outrider.text.tokenizer import Tokenizer
from outrider.workers.proposers.registry import traits

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

_CHARS_A_TOKEN = 4  # a beginning of so many for each token that fits tells of most texts
_LAST_WORD_TOKENS = 64  # that its last word, cut in two, may be too many


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request: what is to be computed, and what becomes text of it."""

    request_id: str
    spec: RequestSpec
    prompt: str | None  # None if it came as ids
    stops: StopAutomaton
    echo: str  # what each text begins with
    deadline_s: float | None = None


class FrontDoor:
    """Checks requests against one engine's models and limits. Several threads may do so at once.

    `chat_template` takes the place of the model's own. Templates run in `processes` as
    `ChatTemplate` has it.
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
            # The first call clears truncation and padding that a checkpoint may come with, which
            # is no change to make while other threads tokenise.
            tokenizer.encode("")
        self._num_seedless = 0

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        seed: int | None = None,
        cache_salt: str = "",
        tenant: str = "",
    ) -> PreparedRequest:
        """`seed` is one that `settle_seed` gave; left out, it is settled here."""
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
            is_depth_fixed=params.fix_depth and proposer != NOBODY,
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

    def chat_prompt(
        self,
        messages: Sequence[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, list[int]]:
        """A conversation as the prompt that the model's template, or the one given, makes of it."""
        text = self._chat.render(
            messages, chat_template, add_generation_prompt, chat_template_kwargs
        )
        return {"prompt_token_ids": self._encode(text, add_special_tokens=False)}

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, which may be as long as a prompt."""
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer; there is nothing to read text with.")
        return self._encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids, of which there may be as many as the model can hold."""
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer; there is nothing to write text with.")
        most = self._facts.max_model_len
        if len(token_ids) > most:
            raise RequestError(
                f"token_ids has {len(token_ids)} entries; it may have {most} (max_model_len), so "
                "ask for parts."
            )
        ids = list(token_ids)
        self._check_ids("token_ids", ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def settle_seed(self, params: SamplingParams) -> int:
        """The seed of a request; those that bring none take the next one of a seeded engine."""
        if params.seed is not None:
            return params.seed % 2**64
        if self._config.seed is None:
            return secrets.randbits(64)
        self._num_seedless += 1
        return sample_seed(self._config.seed % 2**64, self._num_seedless)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt; one that cannot fit is refused without being tokenised."""
        assert self._tokenizer is not None
        sizes, most = self._token_sizes, self._facts.max_model_len - 1
        if sizes is not None and (least := sizes.least_tokens(text)) > most:
            raise self._too_long(f"{len(text)} characters, which are at least {least} tokens")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds half a character ({text[error.start]!r}) at {error.start}; "
                "give whole ones."
            ) from None
        self._check_beginnings(text, most)
        return self._ids(text, add_special_tokens=add_special_tokens)

    def _check_beginnings(self, text: str, most: int) -> None:
        """Refuses what is far too long by its beginning: tokenising all of it may take seconds."""
        size = _CHARS_A_TOKEN * most
        while size < len(text):
            count = len(self._ids(text[:size], add_special_tokens=False))
            if count > most + _LAST_WORD_TOKENS:
                raise self._too_long(
                    f"{len(text)} characters, the first {size} of which are {count} tokens"
                )
            size *= 2

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None
        # Not verbose: what is too long is told to whoever asked, not to the log.
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded)

    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"}
            if len(prompt) != 1 or not known.issuperset(prompt):
                raise RequestError(
                    f"a prompt given as a mapping has the keys {sorted(prompt)}; it must have "
                    "either 'prompt' or 'prompt_token_ids'."
                )
            return self._prompt(next(iter(prompt.values())))
        if not isinstance(prompt, Sequence):
            raise RequestError(f"the prompt is {prompt!r}; it must be text or a list of token ids.")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    "the prompt is text but the model has no tokenizer; "
                    "give {'prompt_token_ids': [...]} instead."
                )
            return prompt, self._encode(prompt)
        self._check_length(len(prompt))  # before anything is done with each of them
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
        most = self._facts.max_model_len
        return ContextLengthError(
            most,
            f"your prompt contains {size}; shorten it to {most - 1} tokens or fewer, or have the "
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
        """Who drafts for the request, and how far."""
        method = params.speculation or self._config.method or OFF
        depth = params.num_speculative_tokens
        if depth is None:
            depth = self._facts.depth
        if method == OFF:
            return NOBODY, 0
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
        """Each word at the start of a line and inside one: tokenizers spell these differently."""
        if not params.bad_words or self._tokenizer is None:
            return ()
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for spelling in (word, " " + word.lstrip()):
                ids = self._tokenizer.encode(spelling, add_special_tokens=False)
                found[tuple(ids)] = None
        return tuple(found)
