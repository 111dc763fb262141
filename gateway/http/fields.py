"""Unsupported fields of OpenAI's and vLLM's requests: which are refused, which are ignored, and
the warning about unknown ones."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import MAX_SHOWN_CHARS, FieldRefusedError, shown

WARNING = "X-Outrider-Warning"
MAX_NAMED = 3  # unknown fields that a warning names
_MAX_NAME_CHARS = 40
_LIKENESS = 0.75  # from 0 to 1, that a known name has to an unknown one before it is suggested


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that requests something unsupported, unless its value is null or `harmless`. It has
    no effect where the field `switch` is "none"."""

    what: str  # that it requests
    harmless: tuple[Any, ...] = ()
    remedy: str = "leave the field out"
    switch: str = ""

    def check(self, name: str, value: Any) -> None:
        if value is None or any(
            value == fine and type(value) is type(fine) for fine in self.harmless
        ):
            return
        others = "".join(f" or send {json.dumps(fine)}" for fine in self.harmless[:1])
        if self.switch:
            others = f' or set {self.switch} to "none"'
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
    "functions": Refusal(_TOOLS, ([],), switch="function_call"),
    "guided_choice": Refusal(_STRUCTURED),
    "guided_grammar": Refusal(_STRUCTURED),
    "guided_json": Refusal(_STRUCTURED),
    "guided_regex": Refusal(_STRUCTURED),
    "guided_whitespace_pattern": Refusal(_STRUCTURED),
    "kv_transfer_params": Refusal("handing over a prompt between servers"),
    "length_penalty": Refusal(_BEAMS, (1.0, 1)),
    "logits_processors": Refusal("bringing processors of logits", ([],)),
    "logprob_token_ids": Refusal("choosing the tokens whose log-probabilities are returned"),
    "lora_request": Refusal("choosing an adapter"),
    "media_io_kwargs": Refusal(_OTHER_PROMPTS, ({},)),
    "mm_processor_kwargs": Refusal(_OTHER_PROMPTS, ({},)),
    "modalities": Refusal("any answer but text", (["text"],)),
    "prompt_embeds": Refusal(_OTHER_PROMPTS),
    "repetition_detection": Refusal("ending a text that repeats itself"),
    "response_format": Refusal(_STRUCTURED, ({"type": "text"},)),
    "return_assistant_tokens_mask": Refusal("returning which tokens an assistant wrote", (False,)),
    "return_prompt_text": Refusal("returning the text of the prompt", (False,)),
    "return_token_offsets": Refusal("returning where tokens begin in the text", (False,)),
    "routed_experts_prompt_start": Refusal("returning the experts of tokens", (0,)),
    "spaces_between_special_tokens": Refusal("leaving spaces out between special tokens", (True,)),
    "structured_outputs": Refusal(_STRUCTURED),
    "suffix": Refusal("writing what stands before a suffix", ("",)),
    "thinking_token_budget": Refusal("a budget for thinking", (-1,)),
    "tool_choice": Refusal(_TOOLS, ("none",)),
    "tools": Refusal(_TOOLS, ([],), switch="tool_choice"),
    "truncate_prompt_tokens": Refusal("cutting the prompt"),
    "use_beam_search": Refusal(_BEAMS, (False,)),
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
# They name the user, what to do with the response, or how to compute the same output.
IGNORED = frozenset(
    {
        *("guided_decoding_backend", "include_reasoning", "metadata", "moderation"),
        *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store"),
        *("stream_interval", "truncation_side", "user", "verbosity"),
    }
)


def check_extras(extras: Mapping[str, Any], refused: Mapping[str, Refusal]) -> None:
    """Refuse fields that would change the output."""
    for name, value in extras.items():
        refusal = refused.get(name)
        if refusal and not (refusal.switch and extras.get(refusal.switch) == "none"):
            refusal.check(name, value)


def unknown_of(extras: Mapping[str, Any], refused: Mapping[str, Refusal]) -> list[str]:
    return [name for name in extras if name not in refused and name not in IGNORED]


def warning_of(unknown: Sequence[str], known: frozenset[str]) -> str:
    """One ASCII line of bounded length for any names: it goes into a header."""
    named = [_escaped(name) + _suggestion(name, known) for name in unknown[:MAX_NAMED]]
    if len(unknown) > MAX_NAMED:
        named.append(f"and {len(unknown) - MAX_NAMED} more")
    return f"ignored unknown fields: {', '.join(named)}"


def refuse_unknown(name: str, known: frozenset[str]) -> FieldRefusedError:
    """The error where server.unknown_fields is "refuse"."""
    return FieldRefusedError(
        name[:MAX_SHOWN_CHARS],
        f"{_escaped(name)} is no field of this request{_suggestion(name, known)}; leave it out, or "
        "have the server set server.unknown_fields to warn.",
    )


def _suggestion(name: str, known: frozenset[str]) -> str:
    nearest = _nearest(name[:_MAX_NAME_CHARS], known)
    return f" (did you mean '{nearest}'?)" if nearest else ""


@functools.lru_cache(maxsize=256)
def _nearest(name: str, known: frozenset[str]) -> str | None:
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_LIKENESS)
    return found[0] if found else None


def _escaped(name: str) -> str:
    return ascii(name[:_MAX_NAME_CHARS])[:MAX_SHOWN_CHARS]
