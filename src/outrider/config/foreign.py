"""vLLM's arguments that have no counterpart here: which are let pass, and which would change what
comes out and are refused; and what its command has beside them. `docs/from-vllm.md` shows them all;
a test keeps it true."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.errors import ConfigError

logger = logging.getLogger(__name__)


class Refused(NamedTuple):
    """An argument that asks for something that is not there."""

    without_effect: tuple[Any, ...]  # values, besides None, that ask for nothing
    reason: str  # completes "NAME is VALUE; ..."


_BLOCKS = "there is one block manager"
_PREEMPTED = "a request that is preempted is computed again"
_RECORDED = "passes are recorded where that pays"
_OWN_CODE = "checkpoints never bring code"
_PROCESSES = "workers and cluster.* say where the processes are"
_STATISTICS = "statistics are kept per request and per server"
_REPLICAS = "cluster.replicas and Ray say where the replicas are"
_TEXT = "prompts are text"

IGNORED: Mapping[str, str] = {
    "use_v2_block_manager": _BLOCKS,
    "swap_space": _PREEMPTED,
    "preemption_mode": _PREEMPTED,
    "trust_remote_code": _OWN_CODE,
    "code_revision": _OWN_CODE,
    "enforce_eager": _RECORDED,
    "compilation_config": _RECORDED,
    "max_seq_len_to_capture": _RECORDED,
    "cuda_graph_sizes": _RECORDED,
    "disable_custom_all_reduce": "sums of ranks go the quickest way there is",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "max_num_partial_prefills": "prompts are always computed in chunks",
    "long_prefill_token_threshold": "prompts are always computed in chunks",
    "disable_log_stats": _STATISTICS,
    "disable_log_requests": _STATISTICS,
    "enable_log_requests": _STATISTICS,
    "tokenizer_mode": "the quickest tokenizer that splits alike is taken",
    "tokenizer_pool_size": "gateways tokenize in threads",
    "tokenizer_pool_type": "gateways tokenize in threads",
    "download_dir": "the hub's own cache is used; HF_HOME moves it",
    "load_format": "the files themselves tell their format",
    "config_format": "the files themselves tell their format",
    "model_loader_extra_config": "the files themselves tell their format",
    "use_tqdm_on_load": "long loading is told by itself",
    "max_parallel_loading_workers": "every rank reads its own share only",
    "distributed_executor_backend": _PROCESSES,
    "worker_use_ray": _PROCESSES,
    "ray_workers_use_nsight": _PROCESSES,
    "num_lookahead_slots": "drafts get as many slots as they need",
    "num_scheduler_steps": "scheduler.lag says how far the host runs ahead",
    "multi_step_stream_outputs": "scheduler.lag says how far the host runs ahead",
    "async_scheduling": "scheduler.lag says how far the host runs ahead",
    "disable_async_output_proc": "scheduler.lag says how far the host runs ahead",
    "scheduler_delay_factor": "the scheduler never waits for more prompts",
    "scheduling_policy": "every request may have a priority",
    "model_impl": "there is one implementation of each family",
    "allowed_local_media_path": _TEXT,
    "limit_mm_per_prompt": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "disable_mm_preprocessor_cache": _TEXT,
    "hf_token": "the hub's own HF_TOKEN is used",
    "enable_dbo": "passes of one batch are not split",
    "disable_cascade_attn": "prefixes that are shared are read once per request",
    "prefix_caching_hash_algo": "blocks are known by their tokens",
    "max_long_partial_prefills": "prompts are always computed in chunks",
    "disable_chunked_mm_input": _TEXT,
    "disable_hybrid_kv_cache_manager": _BLOCKS,
    "safetensors_load_strategy": "every rank reads its own share only",
    "ignore_patterns": "files of weights that are not needed are not fetched",
    "pt_load_map_location": "weights are read to where they are computed with",
    "collect_detailed_traces": _STATISTICS,
    "show_hidden_metrics_for_version": _STATISTICS,
    "optimization_level": _RECORDED,
    "attention_backend": "there is one implementation of attention for each kind of device",
    "all2all_backend": "there are no experts to spread",
    "data_parallel_rank": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "data_parallel_address": _REPLICAS,
    "data_parallel_rpc_port": _REPLICAS,
    "data_parallel_backend": _REPLICAS,
}

_ONE_AXIS = "a text is not spread over devices; tensor_parallel_size splits the model instead."
_LORA_SIZE = Refused((), "LoRA adapters are not there yet; merge one into the weights.")
_LORA = Refused((False,), "LoRA adapters are not there yet; merge one into the weights.")

REFUSED: Mapping[str, Refused] = {
    "pipeline_parallel_size": Refused(
        (1,),
        "layers are not spread over devices; tensor_parallel_size splits each of them instead.",
    ),
    "data_parallel_size": Refused(
        (1,), "an LLM is one replica; serve with cluster.replicas set to have several."
    ),
    "decode_context_parallel_size": Refused((1,), _ONE_AXIS),
    "prefill_context_parallel_size": Refused((1,), _ONE_AXIS),
    "enable_eplb": Refused((False,), "models with experts are not there yet."),
    "kv_cache_memory_bytes": Refused((), "KV is given in gigabytes; use kv_cache_gb."),
    "kv_offloading_size": Refused((), "KV stays on the device; use kv_cache_gb."),
    "enable_prompt_embeds": Refused((False,), "prompts are text or token ids."),
    "logprobs_mode": Refused(
        ("raw_logprobs",), "log-probabilities are those before any sampling parameter."
    ),
    "pooler_config": Refused(({},), "models generate; there are no others."),
    "convert": Refused(("auto", "none"), "models generate; there are no others."),
    "max_loras": _LORA_SIZE,
    "max_lora_rank": _LORA_SIZE,
    "fully_sharded_loras": _LORA,
    "reasoning_parser": Refused(("",), "answers are not split into reasoning and the rest."),
    "scheduler_cls": Refused((), "there is one scheduler; leave it out."),
    "worker_cls": Refused(("auto",), "ranks are of one kind; leave it out."),
    "worker_extension_cls": Refused(("",), "ranks are of one kind; leave it out."),
    "enable_expert_parallel": Refused((False,), "models with experts are not there yet."),
    "kv_cache_dtype": Refused(("auto",), "KV has the target's dtype; leave it out."),
    "cpu_offload_gb": Refused((0,), "weights stay where they are computed with; use quantization."),
    "num_gpu_blocks_override": Refused((), "KV is given in bytes; use kv_cache_gb."),
    "enable_lora": _LORA,
    "lora_modules": _LORA,
    "enable_prompt_adapter": Refused((False,), "prompt adapters are not there; leave it out."),
    "task": Refused(("auto", "generate"), "models generate; there are no others."),
    "runner": Refused(("auto", "generate"), "models generate; there are no others."),
    "skip_tokenizer_init": Refused(
        (False,), "give prompts as token ids; the tokenizer stays for the text of answers."
    ),
    "tokenizer_revision": Refused(
        (), "a tokenizer has the model's revision; give the folder of another as tokenizer."
    ),
    "hf_overrides": Refused(({},), "a checkpoint is read as it is; change its config.json."),
    "rope_scaling": Refused(({},), "a checkpoint is read as it is; change its config.json."),
    "rope_theta": Refused((), "a checkpoint is read as it is; change its config.json."),
    "override_generation_config": Refused(
        ({},), "give the values with SamplingParams, or generation_config='none'."
    ),
    "disable_sliding_window": Refused((False,), "set max_model_len to the window's size."),
    "guided_decoding_backend": Refused(("auto",), "structured output is not there yet."),
    "structured_outputs_config": Refused(({},), "structured output is not there yet."),
    "logits_processors": Refused(([],), "the sampling chain is fixed; leave it out."),
    "kv_transfer_config": Refused((), "one engine computes prompts and answers; leave it out."),
    "enable_sleep_mode": Refused((False,), "an engine does not sleep; close it instead."),
    "speculative_max_model_len": Refused((), "a draft reads as far as its target; leave it out."),
    "speculative_disable_by_batch_size": Refused(
        (), "the speculation policy weighs the load; see speculation_policy."
    ),
    "spec_decoding_acceptance_method": Refused(
        (), "choose verification='shared' or 'rejection' instead."
    ),
}

# -- what the command `vllm serve` has beside the arguments of LLM ------------------------------

COMMAND_PATHS: Mapping[str, str] = {
    "ssl_certfile": "server.tls_cert",
    "ssl_keyfile": "server.tls_key",
    "ssl_ca_certs": "server.tls_client_ca",
    "allowed_origins": "server.cors_origins",
    "trust_request_chat_template": "server.allow_client_templates",
    "api_server_count": "server.processes",
    "data_parallel_size": "cluster.replicas",
}
COMMAND_IGNORED: Mapping[str, str] = {
    "uvicorn_log_level": "log_level is the level of all logs",
    "disable_uvicorn_access_log": "the access log is our own",
    "max_log_len": "prompts are not logged unless server.log_prompts is set",
    "enable_log_outputs": "texts are not logged unless server.log_prompts is set",
    "log_config_file": "log_level and log_format are all there is to set",
    "enable_ssl_refresh": "certificates are read again when they change",
    "ssl_cert_reqs": "server.tls_client_ca says whose certificates clients must show",
    "enable_request_id_headers": "an X-Request-Id that comes is sent back",
    "enable_prompt_tokens_details": "usage always tells the cached tokens",
    "enable_server_load_tracking": "the load is in /metrics and in the status",
    "disable_frontend_multiprocessing": "gateways are always processes of their own",
    "disable_fastapi_docs": "there are no pages of documentation to turn off",
    "chat_template_content_format": "messages of text parts and of plain text are both taken",
    "h11_max_incomplete_event_size": "headers have bounds of their own",
    "h11_max_header_count": "headers have bounds of their own",
    "exclude_tools_when_tool_choice_none": "there are no tools",
}
COMMAND_REFUSED: Mapping[str, str] = {
    "enable_auto_tool_choice": "tools are not there yet.",
    "tool_call_parser": "tools are not there yet.",
    "tool_server": "tools are not there yet.",
    "response_role": "answers have the role 'assistant'.",
    "root_path": "a server has no path before its own; have the proxy remove it.",
    "middleware": "a server takes no code; put a proxy before it.",
    "uds": "a server listens on ports; give --host and --port.",
    "headless": "give the processes on other hosts to Ray, or start them by hand.",
    "nnodes": "the nodes are those of the Ray cluster; see --set cluster.address.",
    "node_rank": "the nodes are those of the Ray cluster; see --set cluster.address.",
    "master_addr": "the nodes are those of the Ray cluster; see --set cluster.address.",
    "otlp_traces_endpoint": "there are no traces; /metrics and the access log tell of requests.",
}


def answer_foreign_names(given: Mapping[str, Any]) -> list[str]:
    """Refuse what vLLM knows and cannot be had, warn once of what has no effect; the names that
    are not vLLM's either are returned."""
    for name, value in given.items():
        refused = REFUSED.get(name)
        if refused is not None and value is not None and value not in refused.without_effect:
            raise ConfigError(f"{name} is {value!r}; {refused.reason}")
    ignored = [name for name, value in given.items() if name in IGNORED and value is not None]
    if ignored:
        reasons = ", ".join(f"{name} ({IGNORED[name]})" for name in ignored)
        logger.warning("arguments of vLLM's without effect here: %s", reasons)
    return [name for name in given if name not in IGNORED and name not in REFUSED]
