"""The keys and methods of vLLM's `speculative_config`, and their counterparts here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.config.foreign import RefusedArgument, by_name
from outrider.config.rules import did_you_mean

NAME = "speculative_config"

SPECULATIVE_PATHS: Mapping[str, str] = {
    "model": "draft.model",
    "revision": "draft.revision",
    "quantization": "draft.quantization",
    "draft_tensor_parallel_size": "draft.tensor_parallel",
    "method": "speculation.method",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "prompt_lookup_min": "speculation.ngram_min",
    "prompt_lookup_max": "speculation.ngram_max",
}
# No speculation method changes the text, so its implementation options do not either.
SPECULATIVE_IGNORED: Mapping[str, str] = by_name(
    {
        "passes are captured where that pays": "enforce_eager disable_padded_drafter_batch",
        "there is one implementation of each operation for each kind of device": (
            "attention_backend use_local_argmax_reduction disable_mqa_scorer"
        ),
        "there are no experts to spread": "moe_backend",
        "the draft's KV has the draft's dtype": "kv_cache_dtype",
        "a draft reads as far as its target": "max_model_len",
        "checkpoints never bring code": "code_revision",
        "the files themselves tell their format": "draft_load_config",
        "the speculation policy weighs the load; see speculation_policy": (
            "num_speculative_tokens_per_batch_size disable_by_batch_size "
            "enable_adaptive_verification"
        ),
        "a draft samples with the target's noise": "draft_sample_method dspark_draft_topk",
        "log-probabilities are returned with speculation too": "disable_logprobs",
        "its method is not there": (
            "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
            "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob"
        ),
    }
)
_VERIFICATION = "choose verification='shared' or 'rejection' instead."
SPECULATIVE_REFUSED: Mapping[str, RefusedArgument] = {
    "tensor_parallel_size": RefusedArgument((), "give draft_tensor_parallel_size."),
    "parallel_drafting": RefusedArgument(
        (False,), "drafts are made one after the other; leave it out."
    ),
    "use_heterogeneous_vocab": RefusedArgument((False,), "a draft has the target's tokenizer."),
    "rejection_sample_method": RefusedArgument(("standard", "block"), _VERIFICATION),
    "acceptance_method": RefusedArgument(("rejection_sampler",), _VERIFICATION),
    "synthetic_acceptance_rates": RefusedArgument(
        (), "only tokens of the target's own are accepted."
    ),
    "synthetic_acceptance_length": RefusedArgument(
        (), "only tokens of the target's own are accepted."
    ),
}

SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle3", "medusa", "mlp_speculator")
_MTP = "a target's own layers for drafting (MTP) are not read"
_BLOCKS = "drafts that are made as a block are not there"
_REFUSED_METHODS: Mapping[str, str] = {
    "eagle": "heads of EAGLE-1 and EAGLE-2 are not read",
    "mtp": _MTP,
    "suffix": "drafts from suffix trees are not there",
    "ngram_gpu": "n-grams are looked up on the host",
    "dflash": _BLOCKS,
    "dspark": _BLOCKS,
    "extract_hidden_states": "hidden states are not returned",
    "custom_class": "a server takes no code",
}
_OWN_METHODS = ("draft", "off", "[ngram]")


@dataclass(slots=True)
class Speculative:
    """A parsed `speculative_config`."""

    values: list[tuple[str, str, Any]] = field(default_factory=list)  # name as written, path, value
    ignored: dict[str, str] = field(default_factory=dict)  # the reason, by the name as written
    problems: list[str] = field(default_factory=list)


def read_speculative(
    config: Any, name_of: Callable[[str], str] = lambda key: f"{NAME}[{key!r}]"
) -> Speculative:
    """Parse a `speculative_config`; `name_of` formats a key for messages."""
    found = Speculative()
    if not isinstance(config, Mapping):
        found.problems.append(
            f"{NAME} is {config!r}; it must be a dict such as "
            '{"model": ..., "num_speculative_tokens": 5}.'
        )
        return found
    for key, value in config.items():
        _read(key, value, name_of(key), found)
    return found


def _read(key: str, value: Any, name: str, found: Speculative) -> None:
    if key in SPECULATIVE_REFUSED:
        refused = SPECULATIVE_REFUSED[key]
        if refused.asks(value):
            found.problems.append(f"{name} is {value!r}; {refused.reason}")
    elif key not in SPECULATIVE_PATHS and key not in SPECULATIVE_IGNORED:
        hint = did_you_mean(key, [*SPECULATIVE_PATHS, *SPECULATIVE_IGNORED])
        found.problems.append(f"{NAME} has the unknown key {key!r}.{hint}")
    elif value is None:
        return
    elif key in SPECULATIVE_IGNORED:
        found.ignored[name] = SPECULATIVE_IGNORED[key]
    elif key == "method" and value not in (*SPECULATIVE_METHODS, *_OWN_METHODS):
        found.problems.append(f"{name} is {value!r}; {_why_not(value)}")
    else:
        found.values.append((name, SPECULATIVE_PATHS[key], value))


def _why_not(method: Any) -> str:
    reason = _REFUSED_METHODS.get(str(method))
    if reason is None and str(method).endswith("_mtp"):
        reason = _MTP
    known = f"{', '.join(SPECULATIVE_METHODS[:-1])} or {SPECULATIVE_METHODS[-1]}"
    return f"choose {known}." if reason is None else f"{reason}; choose {known}."
