"""Sampling parameters of a request. Pure data, checked on construction."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError, UnknownParameterError, shown

MAX_LOGPROBS = 50
MAX_SAMPLES = 128
OFF = "off"
"""`speculation` of a request without it; any other name is a proposer's."""
# Far more than needed, yet few enough that a request does not slow down others.
MAX_STOPS, MAX_STOP_CHARS = 64, 256
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_FIXED_DEPTH = 8  # drafts of a fixed depth are verified even where they do not pay
MAX_ALLOWED_OF_ALL_SAMPLES = 2**21  # each sample carries the list with it
# Lower runs sooner. One level is worth some seconds of waiting, so none starves others.
SOONEST_PRIORITY, LATEST_PRIORITY = -100, 100
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def _ints(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids, not {shown(value)}.")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise RequestError(f"{name} holds {shown(item)}; every entry must be a token id >= 0.")
    return tuple(value)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{name} has {count} entries; it may have {most}, so leave some out.")


def _strings(name: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise RequestError(f"{name} must be a string or a list of them, not {shown(value)}.")
    items = (value,) if isinstance(value, str) else tuple(value)
    _check_count(name, len(items), most)
    for item in items:
        if not isinstance(item, str) or not item:
            raise RequestError(
                f"{name} holds {shown(item)}; every entry must be a non-empty string."
            )
        if _HALF_CHARACTER.search(item):
            raise RequestError(
                f"{name} holds {shown(item)} with half a character; give whole ones."
            )
        if len(item) > most_chars:
            raise RequestError(
                f"{name} holds {item[:40]!r}... of {len(item)} characters; an entry may have "
                f"{most_chars}, so shorten it."
            )
    return items


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; field names are those a vLLM user knows.

    The chain is applied in float32 in a fixed order: bias, penalties, bans; temperature; min_p;
    top_k; top_p. `temperature=0` takes the most likely token. Speculation never changes the
    result of any of these; `speculation` and `num_speculative_tokens` only override, for this
    request, the proposer and the maximum depth (None: as the engine is configured); `fix_depth`
    makes the depth exactly `num_speculative_tokens`, whatever the engine's policy chooses.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: Sequence[str] | str | None = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    fix_depth: bool = False

    if not TYPE_CHECKING:  # type checkers know the fields without it

        def __new__(cls, *args, **kwargs):
            refuse_unknown(kwargs)
            return object.__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__  # the one place where a frozen instance is normalised
        put(self, "stop", _strings("stop", self.stop, MAX_STOPS, MAX_STOP_CHARS))
        bad_words = _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        put(self, "bad_words", bad_words)
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, Sequence):  # before each is checked
            _check_count("stop_token_ids", len(ids), MAX_STOP_TOKEN_IDS)
        put(self, "stop_token_ids", _ints("stop_token_ids", ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _ints("allowed_token_ids", self.allowed_token_ids))
        put(self, "logit_bias", self._checked_bias())
        if self.top_k == -1:  # vLLM's older spelling of "off"
            put(self, "top_k", 0)
        for name, (kind, is_valid, rule) in _RULES.items():
            value = getattr(self, name)
            if value is None:
                if name in _OPTIONAL:
                    continue
                raise RequestError(f"{name} is None; it must be {rule}.")
            if not _is_kind(value, kind) or not is_valid(value):
                raise RequestError(f"{name} is {shown(value)}; it must be {rule}.")
            if kind is int and value >= 2**64:
                raise RequestError(f"{name} is beyond 64 bits; choose a smaller number.")
        self._check_combinations()

    def _checked_bias(self) -> dict[int, float]:
        checked: dict[int, float] = {}
        given = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(given, Mapping):
            raise RequestError(f"logit_bias must be a mapping from token ids, not {shown(given)}.")
        _check_count("logit_bias", len(given), MAX_LOGIT_BIASES)
        for token, bias in given.items():
            try:
                token_id = int(token) if isinstance(token, str) else operator.index(token)
            except (TypeError, ValueError):
                token_id = -1
            if token_id < 0 or isinstance(token, bool):
                raise RequestError(
                    f"logit_bias has the key {shown(token)}; keys are token ids >= 0."
                )
            if not _is_kind(bias, float) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias[{token_id}] is {shown(bias)}; it must be in [-100, 100]."
                )
            checked[token_id] = float(bias)
        return checked

    def _check_combinations(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty; name at least one token or leave it out."
            )
        if self.n * len(self.allowed_token_ids or ()) > MAX_ALLOWED_OF_ALL_SAMPLES:
            raise RequestError(
                f"allowed_token_ids has {len(self.allowed_token_ids or ())} entries and n is "
                f"{self.n}; multiplied they may be {MAX_ALLOWED_OF_ALL_SAMPLES}, so lower one."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; "
                "min_tokens may be at most max_tokens."
            )
        if self.fix_depth and self.num_speculative_tokens is None:
            raise RequestError(
                "fix_depth is True but num_speculative_tokens is None; say how many to draft."
            )
        if self.fix_depth and (self.num_speculative_tokens or 0) > MAX_FIXED_DEPTH:
            raise RequestError(
                f"num_speculative_tokens is {self.num_speculative_tokens} with fix_depth; it may "
                f"be {MAX_FIXED_DEPTH}, or more as a maximum without fix_depth."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from untrusted data; an unknown name is rejected with a suggestion."""
        refuse_unknown(values)
        return cls(**values)

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


# Names in other programs of parameters here, and vLLM's without a counterpart.
_MEANT = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "num_samples": "n",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "repeat_penalty": "repetition_penalty",
    "top_logprobs": "logprobs",
    "method": "speculation",
    "depth": "num_speculative_tokens",
}
WITHOUT_COUNTERPART = frozenset(
    ("best_of", "use_beam_search", "beam_width", "num_beams", "length_penalty", "early_stopping")
    + ("detokenize", "output_kind", "spaces_between_special_tokens", "truncate_prompt_tokens")
    + ("logits_processors", "guided_decoding", "structured_outputs", "response_format")
    + ("extra_args", "flat_logprobs", "do_sample")
    + ("lora_request", "prompt_adapter_request", "tokenization_kwargs")  # of vLLM's generate()
)


def refuse_unknown(given: Iterable[str]) -> None:
    """Raises on the first name that is not a sampling parameter."""
    known = SamplingParams.__dataclass_fields__
    for name in given:
        if name in known:
            continue
        if name in WITHOUT_COUNTERPART:
            raise UnknownParameterError(
                f"unknown sampling parameter {name!r}; none here does the same, so leave it out."
            )
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
        meant = _MEANT.get(name) or next(iter(near), None)
        hint = f"did you mean {meant!r}?" if meant else f"known are {', '.join(sorted(known))}."
        raise UnknownParameterError(f"unknown sampling parameter {name!r}; {hint}")


def check_priority(priority: Any) -> None:
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_whole or not SOONEST_PRIORITY <= priority <= LATEST_PRIORITY:
        raise RequestError(
            f"priority is {shown(priority)}; it must be a whole number from {SOONEST_PRIORITY} to "
            f"{LATEST_PRIORITY}, lower ones running sooner."
        )


def _is_kind(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and abs(value) < math.inf
    return isinstance(value, kind)


_OPTIONAL = {
    "max_tokens",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "speculation",
    "num_speculative_tokens",
}
_Rule = tuple[type, Callable[[Any], bool], str]
_LOGPROBS: _Rule = (int, lambda v: 0 <= v <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or None")
_RULES: dict[str, _Rule] = {
    "n": (int, lambda v: 1 <= v <= MAX_SAMPLES, f"a whole number from 1 to {MAX_SAMPLES}"),
    "temperature": (float, lambda v: 0 <= v <= 100, "a number from 0 to 100"),
    "top_k": (int, lambda v: v >= 0, "a whole number >= 0 (0 turns it off)"),
    "top_p": (float, lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "min_p": (float, lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    "presence_penalty": (float, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "frequency_penalty": (float, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "repetition_penalty": (float, lambda v: 0.01 <= v <= 100, "a number from 0.01 to 100"),
    "min_tokens": (int, lambda v: v >= 0, "a whole number >= 0"),
    "max_tokens": (int, lambda v: v >= 1, "a whole number >= 1, or None for no limit"),
    "ignore_eos": (bool, lambda v: True, "True or False"),
    "echo": (bool, lambda v: True, "True or False"),
    "skip_special_tokens": (bool, lambda v: True, "True or False"),
    "include_stop_str_in_output": (bool, lambda v: True, "True or False"),
    "seed": (int, lambda v: -(2**63) <= v < 2**64, "a 64-bit whole number or None"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "speculation": (str, str.isidentifier, "a proposer's name, 'off' or None"),
    "num_speculative_tokens": (int, lambda v: 0 <= v <= 32, "a whole number from 0 to 32, or None"),
    "fix_depth": (bool, lambda v: True, "True or False"),
}


_MIN_TEMPERATURE = 1e-5


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _MIN_TEMPERATURE
