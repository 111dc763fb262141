"""vLLM's command line: the options of `vllm serve` besides its engine arguments, their numbers of
values, and their short names."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.config.foreign import RefusedArgument, by_name

COMMAND_PATHS: Mapping[str, str] = {
    "ssl_certfile": "server.tls_cert",
    "ssl_keyfile": "server.tls_key",
    "ssl_ca_certs": "server.tls_client_ca",
    "allowed_origins": "server.cors_origins",
    "trust_request_chat_template": "server.allow_client_templates",
    "api_server_count": "server.processes",
    "shutdown_timeout": "server.drain_s",
    "data_parallel_size": "cluster.replicas",
}
"""These override the engine's: a command has replicas, an LLM is one."""

SPECULATIVE_SHORT: Mapping[str, str] = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""Options that are keys of `speculative_config`."""

COMMAND_IGNORED: Mapping[str, str] = by_name(
    {
        "log_level is the level of all logs": "uvicorn_log_level",
        "the access log is our own": "disable_uvicorn_access_log disable_access_log_for_endpoints",
        "prompts are not logged unless server.log_prompts is set": (
            "max_log_len enable_log_outputs enable_log_deltas"
        ),
        "log_level and log_format are the only log settings": "log_config_file log_error_stack",
        "certificates are read again when they change": "enable_ssl_refresh",
        "server.tls_client_ca says whose certificates clients must show": "ssl_cert_reqs",
        "an X-Request-Id that comes is sent back": "enable_request_id_headers",
        "usage always tells the cached tokens": "enable_prompt_tokens_details",
        "the load is in /metrics and in the status": "enable_server_load_tracking",
        "gateways are always separate processes": "disable_frontend_multiprocessing",
        "there are no pages of documentation": "disable_fastapi_docs enable_offline_docs",
        "messages of text parts and of plain text are both taken": "chat_template_content_format",
        "headers have their own limits": "h11_max_incomplete_event_size h11_max_header_count",
        "requests that bring tools are refused one by one": (
            "enable_auto_tool_choice tool_call_parser tool_parser_plugin"
        ),
        "tools are never part of a prompt": "exclude_tools_when_tool_choice_none",
        "there are no routes of Cohere's": "cohere_is_reasoning_model cohere_format",
        "models generate; there are no others": "enable_flash_late_interaction",
        "system_fingerprint is our own": "fingerprint_mode fingerprint_value",
        "cluster.replicas and Ray say where the replicas are": (
            "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
            "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold"
        ),
    }
)

_NODES = RefusedArgument(
    (0, 1), "the nodes are those of the Ray cluster; see --set cluster.address."
)
_TOOLS = "tools are not there yet; leave it out."

COMMAND_REFUSED: Mapping[str, RefusedArgument] = {
    "tool_server": RefusedArgument((), _TOOLS),
    "response_role": RefusedArgument(("assistant",), "answers have the role 'assistant'."),
    "default_chat_template_kwargs": RefusedArgument(
        ({},), "give chat_template_kwargs with each request, or a --chat-template."
    ),
    "return_tokens_as_token_ids": RefusedArgument(
        (False,), "ask for it with each request (return_tokens_as_token_ids)."
    ),
    "enable_force_include_usage": RefusedArgument(
        (False,), "ask for it with each request (stream_options.include_usage)."
    ),
    "enable_per_request_metrics": RefusedArgument(
        (False,), "answers tell no times; /metrics and the access log do."
    ),
    "enable_tokenizer_info_endpoint": RefusedArgument(
        (False,), "there is no such route; /tokenize and /detokenize are there."
    ),
    "tokens_only": RefusedArgument((False,), "text is served too; leave it out."),
    "grpc": RefusedArgument((False,), "our gRPC is always served beside HTTP; see --grpc-port."),
    "allow_credentials": RefusedArgument((False,), "pages send keys as headers, not as cookies."),
    "allowed_methods": RefusedArgument((["*"],), "server.cors_origins may use every method."),
    "allowed_headers": RefusedArgument((["*"],), "server.cors_origins may send every header."),
    "ssl_ciphers": RefusedArgument(
        (), "TLS has its library's ciphers; put a proxy before it for others."
    ),
    "root_path": RefusedArgument(
        ("",), "a server has no path before its own; have the proxy remove it."
    ),
    "middleware": RefusedArgument((), "a server takes no code; put a proxy before it."),
    "uds": RefusedArgument((), "a server listens on ports; give --host and --port."),
    "headless": RefusedArgument(
        (False,), "give the processes on other hosts to Ray, or start them by hand."
    ),
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "otlp_traces_endpoint": RefusedArgument(
        (), "there are no traces; /metrics and the access log tell of requests."
    ),
}

_FLAGS = (
    "aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling "
    "calculate_kv_scales cohere_is_reasoning_model cudagraph_metrics data_parallel_external_lb "
    "data_parallel_hybrid_lb data_parallel_multi_port_external_lb dcp_q_replicate "
    "disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce "
    "disable_fastapi_docs disable_frontend_multiprocessing disable_hybrid_kv_cache_manager "
    "disable_async_output_proc disable_log_requests disable_log_stats "
    "disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization disable_sliding_window "
    "disable_uvicorn_access_log enable_auto_tool_choice enable_bf16x3_router_gemm "
    "enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep "
    "enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance "
    "enable_flash_late_interaction enable_flashinfer_autotune enable_force_include_usage "
    "enable_layerwise_nvtx_tracing enable_log_deltas enable_log_outputs enable_log_requests "
    "enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding "
    "enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras "
    "enable_offline_docs enable_per_request_metrics enable_prefix_caching "
    "enable_prompt_adapter enable_prompt_embeds enable_prompt_tokens_details "
    "enable_request_id_headers enable_return_routed_experts enable_server_load_tracking "
    "enable_sleep_mode enable_ssl_refresh enable_tokenizer_info_endpoint "
    "enable_tower_connector_lora enable_trace_replay enforce_eager "
    "exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras grpc "
    "headless interleave_mm_strings jit_monitor_verbose kv_cache_metrics "
    "kv_sharing_fast_prefill language_model_only log_error_stack mm_device_do_normalize "
    "mm_encoder_only multi_step_stream_outputs numa_bind ray_workers_use_nsight "
    "return_sampling_mask return_tokens_as_token_ids scheduler_reserve_full_isl "
    "skip_mm_profiling skip_tokenizer_init specialize_active_lora tokens_only "
    "trust_remote_code trust_request_chat_template use_fp64_gumbel use_replayssm "
    "use_tqdm_on_load use_v2_block_manager worker_use_ray"
)
FLAGS = frozenset(_FLAGS.split())
"""Options without a value, which `--no-` turns off."""

_LISTS = (
    "allowed_media_domains api_key collect_detailed_traces cpu_offload_params "
    "cuda_graph_sizes cudagraph_capture_sizes ignore_patterns kv_cache_dtype_skip_layers "
    "logits_processors lora_modules lora_target_modules numa_bind_cpus numa_bind_nodes "
    "offload_params served_model_name"
)
LISTS = frozenset(_LISTS.split())
"""Options of one or more words, up to the next option."""

OPTIONAL = frozenset(("hf_token",))
"""Options that may stand without their value."""

SHORT: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-asc": "api_server_count",
    "-n": "nnodes",
    "-r": "node_rank",
    "-q": "quantization",
    "-sc": "speculative_config",
    "-dc": "diffusion_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-O": "optimization_level",
}
