"""vLLM's arguments that have no counterpart here: which are ignored with a warning, and which would
change what comes out and are refused. `docs/from-vllm.md` shows them all; a test holds the list of
vLLM's options against them. What its command and its speculation have beside them is in
`foreign_command` and `foreign_speculation`."""

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
        "long loading is told by itself": "use_tqdm_on_load",
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
        "ranks of one host stay on cores of their own": "numa_bind numa_bind_nodes numa_bind_cpus",
        "stall_timeout_s says how long a rank may take": (
            "distributed_timeout_seconds cpu_distributed_timeout_seconds"
        ),
        "what is lost is started anew": "enable_fault_tolerance fault_tolerance_config",
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
_LORA_VALUE = Refused((), _LORA_REASON)
_LORA = Refused((False,), _LORA_REASON)
_AS_IT_IS = "a checkpoint is read as it is; change its config.json."
_GENERATES = "models generate; there are no others."
_EXPERTS = Refused((False,), "models with experts are not there yet.")
_REASONING = "answers are not split into reasoning and the rest; leave it out."
_STRUCTURED = "structured output is not there yet; leave it out."
_ONE_SERVER = Refused((False,), "one server has all replicas; leave it out.")
_OFFLOAD = "weights stay where they are computed with; use quantization."

REFUSED: Mapping[str, Refused] = {
    "pipeline_parallel_size": Refused(
        (1,),
        "layers are not spread over devices; tensor_parallel_size splits each of them instead.",
    ),
    "data_parallel_size": Refused(
        (1,), "an LLM is one replica; serve with cluster.replicas set to have several."
    ),
    "data_parallel_external_lb": _ONE_SERVER,
    "data_parallel_hybrid_lb": _ONE_SERVER,
    "data_parallel_multi_port_external_lb": _ONE_SERVER,
    "decode_context_parallel_size": Refused((1,), _ONE_AXIS),
    "prefill_context_parallel_size": Refused((1,), _ONE_AXIS),
    "device_ids": Refused((), "the devices are those of CUDA_VISIBLE_DEVICES; set that."),
    "enable_expert_parallel": _EXPERTS,
    "enable_eplb": _EXPERTS,
    "enable_return_routed_experts": _EXPERTS,
    "kv_cache_memory_bytes": Refused(
        (), "KV is given in gigabytes, for all devices and both models together; use kv_cache_gb."
    ),
    "kv_offloading_size": Refused((), "KV stays on the device; use kv_cache_gb."),
    "kv_events_config": Refused(({},), "blocks of KV are not announced; leave it out."),
    "enable_prompt_embeds": Refused((False,), "prompts are text or token ids."),
    "logprobs_mode": Refused(
        ("raw_logprobs",), "log-probabilities are those before any sampling parameter."
    ),
    "return_sampling_mask": Refused((False,), "log-probabilities are all that is told of others."),
    "enable_trace_replay": Refused((False,), "tokens are the target's own; leave it out."),
    "pooler_config": Refused(({},), _GENERATES),
    "convert": Refused(("auto", "none"), _GENERATES),
    "task": Refused(("auto", "generate"), _GENERATES),
    "runner": Refused(("auto", "generate"), _GENERATES),
    "diffusion_config": Refused(({},), _GENERATES),
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
    "default_mm_loras": Refused(({},), _LORA_REASON),
    "enable_prompt_adapter": Refused((False,), "prompt adapters are not there; leave it out."),
    "reasoning_parser": Refused(("",), _REASONING),
    "reasoning_parser_plugin": Refused(("",), _REASONING),
    "reasoning_config": Refused(({},), _REASONING),
    "scheduler_cls": Refused((), "there is one scheduler; leave it out."),
    "worker_cls": Refused(("auto",), "ranks are of one kind; leave it out."),
    "worker_extension_cls": Refused(("",), "ranks are of one kind; leave it out."),
    "io_processor_plugin": Refused(("",), "a server takes no code; leave it out."),
    "kv_cache_dtype": Refused(("auto",), "KV has the target's dtype; leave it out."),
    "cpu_offload_gb": Refused((0,), _OFFLOAD),
    "offload_group_size": Refused((0,), _OFFLOAD),
    "num_gpu_blocks_override": Refused((), "KV is given in gigabytes; use kv_cache_gb."),
    "quantization_config": Refused(
        ({},), "all layers are rounded alike; give quantization='fp8' or 'int8'."
    ),
    "skip_tokenizer_init": Refused(
        (False,), "give prompts as token ids; the tokenizer stays for the text of answers."
    ),
    "tokenizer_revision": Refused(
        (), "a tokenizer has the model's revision; give the folder of another as tokenizer."
    ),
    "hf_overrides": Refused(({},), _AS_IT_IS),
    "hf_config_path": Refused(("",), _AS_IT_IS),
    "model_class_overrides": Refused(({},), _AS_IT_IS),
    "rope_scaling": Refused(({},), _AS_IT_IS),
    "rope_theta": Refused((), _AS_IT_IS),
    "override_generation_config": Refused(
        ({},), "give the values with each request, as SamplingParams or over HTTP."
    ),
    "disable_sliding_window": Refused((False,), "set max_model_len to the window's size."),
    "guided_decoding_backend": Refused(("auto",), _STRUCTURED),
    "structured_outputs_config": Refused(({},), _STRUCTURED),
    "logits_processors": Refused(([],), "the sampling chain is fixed; leave it out."),
    "kv_transfer_config": Refused((), "one engine computes prompts and answers; leave it out."),
    "weight_transfer_config": Refused((), "weights stay as they were loaded; leave it out."),
    "enable_sleep_mode": Refused((False,), "an engine does not sleep; close it instead."),
    "spec_decoding_acceptance_method": Refused(
        ("rejection_sampler",), "choose verification='shared' or 'rejection' instead."
    ),
}


def answer_foreign_names(given: Mapping[str, Any]) -> list[str]:
    """Refuse what vLLM knows and cannot be had, all of it at once, and warn once of what has no
    effect; the names that are not vLLM's either are returned."""
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
    """One line for all of them; the names as they were written, with their reasons."""
    if ignored:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in ignored.items())
        logger.warning("arguments of vLLM's without effect here: %s", reasons)
