"""vLLM's arguments without a counterpart here: those ignored with a warning, and those that would
change the output and are refused. `docs/from-vllm.md` lists them all; a test compares them with
vLLM's options. Those of its command and of `speculative_config` are in `foreign_command` and
`foreign_speculation`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.errors import ConfigError

logger = logging.getLogger(__name__)


class RefusedArgument(NamedTuple):
    """An argument for a missing feature."""

    without_effect: tuple[Any, ...]  # values, besides None, that do not request the feature
    reason: str  # completes "NAME is VALUE; ..."

    def asks(self, value: Any) -> bool:
        return value is not None and value not in self.without_effect


def by_name(reasons: Mapping[str, str]) -> Mapping[str, str]:
    """The reason of each name, from the names of each reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


IGNORED: Mapping[str, str] = by_name(
    {
        "there is one block manager": "use_v2_block_manager disable_hybrid_kv_cache_manager",
        "a request that is preempted is computed again": "swap_space preemption_mode",
        "a request is admitted when its prompt fits": "scheduler_reserve_full_isl watermark",
        "checkpoints never bring code": "trust_remote_code code_revision",
        "passes are captured where that pays": (
            "enforce_eager compilation_config max_seq_len_to_capture cuda_graph_sizes "
            "cudagraph_capture_sizes max_cudagraph_capture_size optimization_level "
            "performance_mode"
        ),
        "there is one implementation of each operation for each kind of device": (
            "attention_backend attention_config disable_cascade_attn override_attention_dtype "
            "kernel_config linear_backend ir_op_priority enable_flashinfer_autotune "
            "kv_sharing_fast_prefill use_fp64_gumbel additional_config enable_cumem_allocator"
        ),
        "sums of ranks go the quickest way there is": "disable_custom_all_reduce",
        "prompts are always computed in chunks": (
            "enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills "
            "long_prefill_token_threshold prefill_schedule_interval"
        ),
        "scheduler.max_num_batched_tokens bounds a step": "max_num_scheduled_tokens",
        "statistics are kept per request and per server": (
            "disable_log_stats disable_log_requests enable_log_requests collect_detailed_traces "
            "show_hidden_metrics_for_version aggregate_engine_logging kv_cache_metrics "
            "kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics jit_monitor_mode "
            "jit_monitor_verbose enable_logging_iteration_details enable_layerwise_nvtx_tracing "
            "profiler_config"
        ),
        "every answer has its speculation_stats": "per_request_spec_decode_metrics",
        "the quickest tokenizer that splits alike is taken": "tokenizer_mode",
        "gateways tokenize in threads; server.processes adds more": (
            "tokenizer_pool_size tokenizer_pool_type renderer_num_workers"
        ),
        "the hub's own cache is used; HF_HOME moves it": "download_dir",
        "the hub's own HF_TOKEN is used": "hf_token",
        "the files themselves tell their format": (
            "load_format config_format model_loader_extra_config"
        ),
        "long loading is logged": "use_tqdm_on_load",
        "every rank reads its own share only": (
            "max_parallel_loading_workers safetensors_load_strategy "
            "safetensors_prefetch_num_threads safetensors_prefetch_block_size"
        ),
        "files of weights that are not needed are not fetched": "ignore_patterns",
        "weights are read to where they are computed with": "pt_load_map_location",
        "checkpoints quantized in other ways are refused by their names": (
            "allow_deprecated_quantization"
        ),
        "workers and cluster.* say where the processes are": (
            "distributed_executor_backend worker_use_ray ray_workers_use_nsight"
        ),
        "ranks of one host use separate cores": "numa_bind numa_bind_nodes numa_bind_cpus",
        "stall_timeout_s says how long a rank may take": (
            "distributed_timeout_seconds cpu_distributed_timeout_seconds"
        ),
        "lost processes are restarted": "enable_fault_tolerance fault_tolerance_config",
        "cluster.replicas and Ray say where the replicas are": (
            "data_parallel_rank data_parallel_start_rank data_parallel_size_local "
            "data_parallel_address data_parallel_rpc_port data_parallel_backend "
            "disable_nccl_for_dp_synchronization"
        ),
        "a text is not spread over devices": (
            "dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
            "dcp_q_replicate"
        ),
        "drafts get as many slots as they need": "num_lookahead_slots",
        "a draft reads as far as its target": "speculative_max_model_len",
        "the speculation policy weighs the load; see speculation_policy": (
            "speculative_disable_by_batch_size"
        ),
        "scheduler.lag says how far the host runs ahead": (
            "num_scheduler_steps multi_step_stream_outputs async_scheduling "
            "disable_async_output_proc"
        ),
        "the scheduler never waits for more prompts": "scheduler_delay_factor",
        "every request may have a priority": "scheduling_policy",
        "tokens are sent as they come": "stream_interval",
        "there is one implementation of each family": "model_impl",
        "prompts are text": (
            "allowed_local_media_path allowed_media_domains limit_mm_per_prompt "
            "language_model_only enable_mm_embeds interleave_mm_strings media_io_kwargs "
            "mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
            "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
            "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc "
            "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize skip_mm_profiling "
            "video_pruning_rate video_pruning_method disable_mm_preprocessor_cache "
            "disable_chunked_mm_input ec_transfer_config ec_manager_config"
        ),
        "passes of one batch are not split": (
            "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"
        ),
        "blocks are known by their tokens": (
            "prefix_caching_hash_algo prefix_match_unit prefix_cache_retention_interval"
        ),
        "there are no experts to spread": (
            "all2all_backend moe_backend enable_ep_weight_filter enable_elastic_ep eplb_config "
            "expert_placement_strategy enable_bf16x3_router_gemm"
        ),
        "there are no layers with a recurrent state": (
            "mamba_backend mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype "
            "mamba_cache_mode mamba_ssu_algorithm mamba_cache_philox_rounds "
            "enable_mamba_cache_stochastic_rounding replayssm_buffer_len use_replayssm "
            "gdn_prefill_backend kda_prefill_backend"
        ),
        "KV has the target's dtype": "kv_cache_dtype_skip_layers calculate_kv_scales",
        "KV and weights stay on the device": (
            "kv_offloading_backend offload_backend offload_num_in_group offload_prefetch_step "
            "offload_params cpu_offload_params"
        ),
        "variables that are no settings are refused in any case": "fail_on_environ_validation",
    }
)

_ONE_AXIS = "a text is not spread over devices; tensor_parallel_size splits the model instead."
_LORA_REASON = "LoRA adapters are not there yet; merge one into the weights."
_LORA_VALUE = RefusedArgument((), _LORA_REASON)
_LORA = RefusedArgument((False,), _LORA_REASON)
_AS_IT_IS = "a checkpoint is read as it is; change its config.json."
_GENERATES = "models generate; there are no others."
_EXPERTS = RefusedArgument((False,), "models with experts are not there yet.")
_REASONING = "answers are not split into reasoning and the rest; leave it out."
_STRUCTURED = "structured output is not there yet; leave it out."
_ONE_SERVER = RefusedArgument((False,), "one server has all replicas; leave it out.")
_OFFLOAD = "weights stay where they are computed with; use quantization."

REFUSED: Mapping[str, RefusedArgument] = {
    "pipeline_parallel_size": RefusedArgument(
        (1,),
        "layers are not spread over devices; tensor_parallel_size splits each of them instead.",
    ),
    "data_parallel_size": RefusedArgument(
        (1,), "an LLM is one replica; serve with cluster.replicas set to have several."
    ),
    "data_parallel_external_lb": _ONE_SERVER,
    "data_parallel_hybrid_lb": _ONE_SERVER,
    "data_parallel_multi_port_external_lb": _ONE_SERVER,
    "decode_context_parallel_size": RefusedArgument((1,), _ONE_AXIS),
    "prefill_context_parallel_size": RefusedArgument((1,), _ONE_AXIS),
    "device_ids": RefusedArgument((), "the devices are those of CUDA_VISIBLE_DEVICES; set that."),
    "enable_expert_parallel": _EXPERTS,
    "enable_eplb": _EXPERTS,
    "enable_return_routed_experts": _EXPERTS,
    "kv_cache_memory_bytes": RefusedArgument(
        (), "KV is given in gigabytes, for all devices and both models together; use kv_cache_gb."
    ),
    "kv_offloading_size": RefusedArgument((), "KV stays on the device; use kv_cache_gb."),
    "kv_events_config": RefusedArgument(({},), "blocks of KV are not announced; leave it out."),
    "enable_prompt_embeds": RefusedArgument((False,), "prompts are text or token ids."),
    "logprobs_mode": RefusedArgument(
        ("raw_logprobs",), "log-probabilities are those before any sampling parameter."
    ),
    "return_sampling_mask": RefusedArgument(
        (False,), "sampling masks are not returned; leave it out."
    ),
    "enable_trace_replay": RefusedArgument((False,), "tokens are the target's own; leave it out."),
    "pooler_config": RefusedArgument(({},), _GENERATES),
    "convert": RefusedArgument(("auto", "none"), _GENERATES),
    "task": RefusedArgument(("auto", "generate"), _GENERATES),
    "runner": RefusedArgument(("auto", "generate"), _GENERATES),
    "diffusion_config": RefusedArgument(({},), _GENERATES),
    "enable_lora": _LORA,
    "lora_modules": _LORA,
    "fully_sharded_loras": _LORA,
    "enable_tower_connector_lora": _LORA,
    "specialize_active_lora": _LORA,
    "enable_mixed_moe_lora_format": _LORA,
    "enable_moe_shared_loras": _LORA,
    "max_loras": _LORA_VALUE,
    "max_lora_rank": _LORA_VALUE,
    "max_cpu_loras": _LORA_VALUE,
    "lora_dtype": _LORA_VALUE,
    "lora_target_modules": _LORA_VALUE,
    "default_mm_loras": RefusedArgument(({},), _LORA_REASON),
    "enable_prompt_adapter": RefusedArgument(
        (False,), "prompt adapters are not there; leave it out."
    ),
    "reasoning_parser": RefusedArgument(("",), _REASONING),
    "reasoning_parser_plugin": RefusedArgument(("",), _REASONING),
    "reasoning_config": RefusedArgument(({},), _REASONING),
    "scheduler_cls": RefusedArgument((), "there is one scheduler; leave it out."),
    "worker_cls": RefusedArgument(("auto",), "ranks are of one kind; leave it out."),
    "worker_extension_cls": RefusedArgument(("",), "ranks are of one kind; leave it out."),
    "io_processor_plugin": RefusedArgument(("",), "a server takes no code; leave it out."),
    "kv_cache_dtype": RefusedArgument(("auto",), "KV has the target's dtype; leave it out."),
    "cpu_offload_gb": RefusedArgument((0,), _OFFLOAD),
    "offload_group_size": RefusedArgument((0,), _OFFLOAD),
    "num_gpu_blocks_override": RefusedArgument((), "KV is given in gigabytes; use kv_cache_gb."),
    "quantization_config": RefusedArgument(
        ({},), "all layers are rounded alike; give quantization='fp8' or 'int8'."
    ),
    "skip_tokenizer_init": RefusedArgument(
        (False,), "give prompts as token ids; the tokenizer stays for the text of answers."
    ),
    "tokenizer_revision": RefusedArgument(
        (), "a tokenizer has the model's revision; give the folder of another as tokenizer."
    ),
    "hf_overrides": RefusedArgument(({},), _AS_IT_IS),
    "hf_config_path": RefusedArgument(("",), _AS_IT_IS),
    "model_class_overrides": RefusedArgument(({},), _AS_IT_IS),
    "rope_scaling": RefusedArgument(({},), _AS_IT_IS),
    "rope_theta": RefusedArgument((), _AS_IT_IS),
    "override_generation_config": RefusedArgument(
        ({},), "give the values with each request, as SamplingParams or over HTTP."
    ),
    "disable_sliding_window": RefusedArgument((False,), "set max_model_len to the window's size."),
    "guided_decoding_backend": RefusedArgument(("auto",), _STRUCTURED),
    "structured_outputs_config": RefusedArgument(({},), _STRUCTURED),
    "logits_processors": RefusedArgument(([],), "the sampling chain is fixed; leave it out."),
    "kv_transfer_config": RefusedArgument(
        (), "one engine computes prompts and answers; leave it out."
    ),
    "weight_transfer_config": RefusedArgument(
        (), "weights stay as they were loaded; leave it out."
    ),
    "enable_sleep_mode": RefusedArgument((False,), "an engine does not sleep; close it instead."),
    "spec_decoding_acceptance_method": RefusedArgument(
        ("rejection_sampler",), "choose verification='shared' or 'rejection' instead."
    ),
}


def answer_foreign_names(given: Mapping[str, Any]) -> list[str]:
    """Raise for all refused arguments of vLLM's at once, and warn once of the ignored ones; returns
    the names that vLLM does not have either."""
    refused = [
        f"{name} is {value!r}; {REFUSED[name].reason}"
        for name, value in given.items()
        if name in REFUSED and REFUSED[name].asks(value)
    ]
    if refused:
        raise ConfigError("\n".join(refused))
    ignored = {n: IGNORED[n] for n, value in given.items() if n in IGNORED and value is not None}
    warn_of_ignored(ignored)
    return [name for name in given if name not in IGNORED and name not in REFUSED]


def warn_of_ignored(ignored: Mapping[str, str]) -> None:
    """One log line for all; the names as written, with the reasons."""
    if ignored:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in ignored.items())
        logger.warning("arguments of vLLM's without effect here: %s", reasons)
