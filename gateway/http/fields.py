"""Fields of OpenAI's and vLLM's requests that are not taken up here: which of them are refused, and
which may be there without an effect."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import FieldRefusedError, shown

logger = logging.getLogger(__name__)

MAX_NAMES_LOGGED = 20


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field whose values would change the answer in a way that is not supported, other than null
    and those that are `harmless`."""

    what: str  # it would ask for
    harmless: tuple[Any, ...] = ()
    remedy: str = "leave the field out"

    def check(self, name: str, value: Any) -> None:
        if value is None or any(
            value == fine and type(value) is type(fine) for fine in self.harmless
        ):
            return
        others = "".join(f" or send {json.dumps(fine)}" for fine in self.harmless[:1])
        raise FieldRefusedError(
            name,
            f"{name} is {shown(value)}, but {self.what} is not supported here; {self.remedy}"
            f"{others}.",
        )


_STRUCTURED = "structured output"
_TOOLS = "calling tools"
_BEAMS = "beam search"
_OTHER_PROMPTS = "a prompt that is not text"
REFUSED: dict[str, Refusal] = {
    "audio": Refusal("sound as an answer"),
    "continue_final_message": Refusal("going on with the last message", (False,)),
    "documents": Refusal("giving documents to the template", ([],)),
    "ec_transfer_params": Refusal("handing over a prompt between servers"),
    "function_call": Refusal(_TOOLS, ("none",)),
    "functions": Refusal(_TOOLS, ([],)),
    "guided_choice": Refusal(_STRUCTURED),
    "guided_grammar": Refusal(_STRUCTURED),
    "guided_json": Refusal(_STRUCTURED),
    "guided_regex": Refusal(_STRUCTURED),
    "guided_whitespace_pattern": Refusal(_STRUCTURED),
    "kv_transfer_params": Refusal("handing over a prompt between servers"),
    "length_penalty": Refusal(_BEAMS, (1.0, 1)),
    "logits_processors": Refusal("bringing processors of logits", ([],)),
    "logprob_token_ids": Refusal("choosing the tokens whose log-probabilities are told"),
    "lora_request": Refusal("choosing an adapter"),
    "media_io_kwargs": Refusal(_OTHER_PROMPTS, ({},)),
    "mm_processor_kwargs": Refusal(_OTHER_PROMPTS, ({},)),
    "modalities": Refusal("any answer but text", (["text"],)),
    "prompt_embeds": Refusal(_OTHER_PROMPTS),
    "repetition_detection": Refusal("ending a text that repeats itself"),
    "response_format": Refusal(_STRUCTURED, ({"type": "text"},)),
    "spaces_between_special_tokens": Refusal("leaving spaces out between special tokens", (True,)),
    "structured_outputs": Refusal(_STRUCTURED),
    "suffix": Refusal("writing what stands before a suffix", ("",)),
    "thinking_token_budget": Refusal("a budget for thinking", (-1,)),
    "tool_choice": Refusal(_TOOLS, ("none",)),
    "tools": Refusal(_TOOLS, ([],)),
    "truncate_prompt_tokens": Refusal("cutting the prompt"),
    "use_beam_search": Refusal(_BEAMS, (False,)),
    "verbosity": Refusal("choosing how wordy the model is", ("medium",)),
    "vllm_xargs": Refusal("arguments of vLLM's own extensions", ({},)),
    "watermarking": Refusal("marking the text", (False,)),
    "web_search_options": Refusal("searching the web"),
}
REFUSED_IN_CHAT = {
    "add_special_tokens": Refusal("adding special tokens to those of the template", (False,)),
    "echo": Refusal("beginning the answer with the last message", (False,)),
    "prompt": Refusal("a prompt without messages", remedy="send it to /v1/completions"),
}
REFUSED_IN_COMPLETIONS = {
    "add_special_tokens": Refusal("leaving out the model's special tokens", (True,)),
    "messages": Refusal("a conversation", remedy="send it to /v1/chat/completions"),
}
REFUSED_IN_MESSAGES = {
    "audio": Refusal("sound in a message"),
    "function_call": Refusal(_TOOLS),
    "tool_calls": Refusal(_TOOLS, ([],)),
}
# They say who asks, what else is to be done with the answer, or how to compute what is the same.
IGNORED = frozenset(
    {
        *("guided_decoding_backend", "include_reasoning", "metadata", "moderation"),
        *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store"),
        *("stream_interval", "truncation_side", "user"),
    }
)


def check_extras(extras: Mapping[str, Any], refused: Mapping[str, Refusal]) -> None:
    """Refuse what would change the answer; what nobody knows is ignored, but can be looked up."""
    unknown = []
    for name, value in extras.items():
        if name in refused:
            refused[name].check(name, value)
        elif name not in IGNORED:
            unknown.append(name)
    if unknown and logger.isEnabledFor(logging.DEBUG):
        names = ", ".join(shown(name) for name in unknown[:MAX_NAMES_LOGGED])
        logger.debug("ignored %d unknown fields of a request: %s", len(unknown), names)
