"""The flat argument names of `LLM(...)`: ours and vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outrider.config.foreign import answer_foreign_names, warn_of_ignored
from outrider.config.foreign_speculation import NAME as SPECULATIVE_CONFIG
from outrider.config.foreign_speculation import read_speculative
from outrider.config.rules import did_you_mean
from outrider.errors import ConfigError

PATHS: Mapping[str, str] = {
    "model": "target.model",
    "tokenizer": "target.tokenizer",
    "revision": "target.revision",
    "dtype": "target.dtype",
    "quantization": "target.quantization",
    "device": "target.device",
    "tensor_parallel_size": "target.tensor_parallel",
    "max_model_len": "target.max_model_len",
    "draft_model": "draft.model",
    "speculative_model": "draft.model",
    "draft_revision": "draft.revision",
    "draft_dtype": "draft.dtype",
    "draft_quantization": "draft.quantization",
    "draft_device": "draft.device",
    "draft_tensor_parallel_size": "draft.tensor_parallel",
    "head_model": "head.model",
    "head_revision": "head.revision",
    "head_method": "head.method",
    "speculative_draft_tensor_parallel_size": "draft.tensor_parallel",
    "method": "speculation.method",
    "speculation_policy": "speculation.policy",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "verification": "speculation.verification",
    "draft_ahead": "speculation.draft_ahead",
    "ngram_min": "speculation.ngram_min",
    "ngram_max": "speculation.ngram_max",
    "ngram_prompt_lookup_min": "speculation.ngram_min",
    "ngram_prompt_lookup_max": "speculation.ngram_max",
    "block_size": "cache.block_size",
    "kv_cache_gb": "cache.kv_cache_gb",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "enable_prefix_caching": "cache.prefix_caching",
    "prefix_sharing": "cache.prefix_sharing",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "step_limit_ms": "scheduler.step_limit_ms",
    "lag": "scheduler.lag",
    "priority_aging_s": "scheduler.priority_aging_s",
    "max_waiting": "scheduler.max_waiting",
    "host": "server.host",
    "port": "server.port",
    "grpc_port": "server.grpc_port",
    "admin_port": "server.admin_port",
    "served_model_name": "server.model_names",
    "gateway_processes": "server.processes",
    "controllers": "server.controllers",
    "generation_config": "server.generation_config",
    "chat_template": "server.chat_template",
    "allow_client_templates": "server.allow_client_templates",
    "page": "server.page",
    "api_key": "server.api_key",
    "api_keys_file": "server.api_keys_file",
    "allow_anonymous": "server.allow_anonymous",
    "tls_cert": "server.tls_cert",
    "tls_key": "server.tls_key",
    "tls_client_ca": "server.tls_client_ca",
    "cors_origins": "server.cors_origins",
    "max_requests": "server.max_requests",
    "max_body_bytes": "server.max_body_bytes",
    "max_prompt_tokens": "server.max_prompt_tokens",
    "max_samples": "server.max_samples",
    "max_logprobs": "server.max_logprobs",
    "max_streams_per_connection": "server.max_streams_per_connection",
    "max_connections_per_address": "server.max_connections_per_address",
    "trusted_proxies": "server.trusted_proxies",
    "max_connection_age_s": "server.max_connection_age_s",
    "max_connection_grace_s": "server.max_connection_grace_s",
    "header_timeout_s": "server.header_timeout_s",
    "queue_timeout_s": "server.queue_timeout_s",
    "resume_window_s": "server.resume_window_s",
    "max_resumable": "server.max_resumable",
    "drain_s": "server.drain_s",
    "unknown_fields": "server.unknown_fields",
    "vllm_metrics": "server.vllm_metrics",
    "log_prompts": "server.log_prompts",
    "ray_address": "cluster.address",
    "ray_timeout_s": "cluster.ray_timeout_s",
    "replicas": "cluster.replicas",
    "first_replica": "cluster.first_replica",
    "listen": "cluster.listen",
    "target_labels": "cluster.target_labels",
    "draft_labels": "cluster.draft_labels",
    "placement_timeout_s": "cluster.placement_timeout_s",
    "start_timeout_s": "cluster.start_timeout_s",
    "standby": "cluster.standby",
    "colocate": "cluster.colocate",
    "workers": "workers",
    "stall_timeout_s": "stall_timeout_s",
    "deterministic": "deterministic",
    "seed": "seed",
    "cpu_kernels": "cpu_kernels",
    "num_threads": "num_threads",
    "log_level": "log_level",
    "log_format": "log_format",
}

NONE = "none"
"""As a draft's name: no draft. Python's None means "not given"."""
OFF = "off"
"""As a method: no proposer, regardless of other settings."""

_DTYPE_WORDS = {
    **{"half": "float16", "fp16": "float16", "bf16": "bfloat16"},
    **{"float": "float32", "fp32": "float32"},
}
_WORDS: Mapping[str, Mapping[str, str | None]] = {
    "target.dtype": _DTYPE_WORDS,
    "draft.dtype": _DTYPE_WORDS,
    "draft.model": {NONE: None},
    "speculation.method": {"draft_model": "draft", "[ngram]": "ngram", OFF: None},
    "server.generation_config": {"vllm": "none"},
}


def settings_from_kwargs(
    kwargs: Mapping[str, Any], name_of: Callable[[str], str] = str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by path, and by path the caller's name, formatted by `name_of`.

    None means "not given".
    """
    return settle((name_of(name), path, value) for name, path, value in _flattened(kwargs))


def settle(given: Iterable[tuple[str, str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by path, and by path the name that set it, from (name, path, value as written);
    raises if two names set a path to different values."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    written: dict[str, Any] = {}
    for name, path, value in given:
        for own_path, own in _resolved(path, value):
            if own_path in values and values[own_path] != own:
                from outrider.config.schema import find_setting  # which imports this module

                first, second = repr(written[own_path]), repr(value)
                if find_setting(own_path).rule.is_secret:
                    first, second = "one value", "another"
                raise ConfigError(
                    f"{names[own_path]} is {first} and {name} is {second}, but both "
                    f"set {own_path}; give only one of them."
                )
            values[own_path] = own
            written.setdefault(own_path, value)
            names.setdefault(own_path, name)
    return values, names


def _resolved(path: str, value: Any) -> list[tuple[str, Any]]:
    """The (path, value) pairs that an argument sets."""
    if path == "draft.model" and value == "[ngram]":
        return [("speculation.method", "ngram")]
    if path == "speculation.method" and value == OFF:
        return [(path, None), ("draft.model", None)]
    return [(path, _plain(path, value))]


def _flattened(kwargs: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(name as written, path, value) of all arguments."""
    known = [*PATHS, SPECULATIVE_CONFIG]
    foreign = {name: value for name, value in kwargs.items() if name not in known}
    for name in answer_foreign_names(foreign):
        raise ConfigError(f"{name} is no argument of LLM.{did_you_mean(name, known)}")
    flat = [(n, PATHS[n], v) for n, v in kwargs.items() if n in PATHS and v is not None]
    if kwargs.get(SPECULATIVE_CONFIG) is not None:
        speculative = read_speculative(kwargs[SPECULATIVE_CONFIG])
        if speculative.problems:
            raise ConfigError("\n".join(speculative.problems))
        warn_of_ignored(speculative.ignored)
        flat += speculative.values
    return flat


def _plain(path: str, value: Any) -> Any:
    """Paths, torch dtypes and torch devices as strings."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__.partition(".")[0] == "torch":
        value = str(value).removeprefix("torch.")
    if isinstance(value, str):
        return _WORDS.get(path, {}).get(value, value)
    return value
