"""The flat names of `LLM(...)`: ours and those a vLLM user's code already has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from outrider.config.rules import did_you_mean
from outrider.errors import ConfigError

PATHS: Mapping[str, str] = {
    "model": "target.model",
    "revision": "target.revision",
    "dtype": "target.dtype",
    "quantization": "target.quantization",
    "device": "target.device",
    "tensor_parallel_size": "target.tensor_parallel",
    "max_model_len": "target.max_model_len",
    "draft_model": "draft.model",
    "speculative_model": "draft.model",
    "draft_dtype": "draft.dtype",
    "draft_quantization": "draft.quantization",
    "draft_device": "draft.device",
    "draft_tensor_parallel_size": "draft.tensor_parallel",
    "speculative_draft_tensor_parallel_size": "draft.tensor_parallel",
    "method": "speculation.method",
    "speculation_policy": "speculation.policy",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "verification": "speculation.verification",
    "ngram_min": "speculation.ngram_min",
    "ngram_max": "speculation.ngram_max",
    "ngram_prompt_lookup_min": "speculation.ngram_min",
    "ngram_prompt_lookup_max": "speculation.ngram_max",
    "block_size": "cache.block_size",
    "kv_cache_gb": "cache.kv_cache_gb",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "enable_prefix_caching": "cache.prefix_caching",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "step_limit_ms": "scheduler.step_limit_ms",
    "lag": "scheduler.lag",
    "priority_aging_s": "scheduler.priority_aging_s",
    "max_waiting": "scheduler.max_waiting",
    "host": "server.host",
    "port": "server.port",
    "served_model_name": "server.model_name",
    "allow_client_templates": "server.allow_client_templates",
    "max_requests": "server.max_requests",
    "ray_address": "cluster.address",
    "placement_timeout_s": "cluster.placement_timeout_s",
    "start_timeout_s": "cluster.start_timeout_s",
    "colocate": "cluster.colocate",
    "workers": "workers",
    "stall_timeout_s": "stall_timeout_s",
    "deterministic": "deterministic",
    "seed": "seed",
    "cpu_kernels": "cpu_kernels",
    "num_threads": "num_threads",
    "log_level": "log_level",
}

_SPECULATIVE_CONFIG_PATHS: Mapping[str, str] = {
    "model": "draft.model",
    "quantization": "draft.quantization",
    "draft_tensor_parallel_size": "draft.tensor_parallel",
    "method": "speculation.method",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "prompt_lookup_min": "speculation.ngram_min",
    "prompt_lookup_max": "speculation.ngram_max",
}

# vLLM switches that have no counterpart because nothing here depends on them: checkpoints never
# bring code, and there is one block manager.
_WITHOUT_EFFECT = frozenset({"use_v2_block_manager", "trust_remote_code", "enforce_eager"})

_DTYPE_WORDS = {"half": "float16", "float": "float32"}
_METHOD_WORDS = {"draft_model": "draft", "[ngram]": "ngram"}


def settings_from_kwargs(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by path, and by path the name the caller used. None means "not given"."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, path, value in _flattened(kwargs):
        if path == "draft.model" and value == "[ngram]":
            path, value = "speculation.method", "ngram"
        value = _plain(path, value)
        if path in values and values[path] != value:
            raise ConfigError(
                f"{names[path]} is {values[path]!r} and {name} is {value!r}, but both set {path}; "
                "give only one of them."
            )
        values[path] = value
        names.setdefault(path, name)
    return values, names


def _flattened(kwargs: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(name as written, path, value) of everything given."""
    nested = kwargs.get("speculative_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError(
            f"speculative_config is {nested!r}; it must be a dict such as "
            '{"model": ..., "num_speculative_tokens": 5}.'
        )
    known = [*PATHS, "speculative_config", *_WITHOUT_EFFECT]
    flat: list[tuple[str, str, Any]] = []
    for name, value in kwargs.items():
        if name not in known:
            raise ConfigError(f"{name} is no argument of LLM.{did_you_mean(name, known)}")
        if value is not None and name in PATHS:
            flat.append((name, PATHS[name], value))
    for key, value in (nested or {}).items():
        if key not in _SPECULATIVE_CONFIG_PATHS:
            hint = did_you_mean(key, _SPECULATIVE_CONFIG_PATHS)
            raise ConfigError(f"speculative_config has the unknown key {key!r}.{hint}")
        if value is not None:
            flat.append((f"speculative_config[{key!r}]", _SPECULATIVE_CONFIG_PATHS[key], value))
    return flat


def _plain(path: str, value: Any) -> Any:
    """Paths, torch dtypes and torch devices as the strings the configuration holds."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__.partition(".")[0] == "torch":
        value = str(value).removeprefix("torch.")
    if isinstance(value, str):
        words = {"target.dtype": _DTYPE_WORDS, "draft.dtype": _DTYPE_WORDS}
        words["speculation.method"] = _METHOD_WORDS
        return words.get(path, {}).get(value, value)
    return value
