"""vLLM's arguments that have no counterpart here: which are let pass, and which would change what
comes out and are refused. `docs/from-vllm.md` shows both; a test keeps it true."""

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
    "allowed_local_media_path": "prompts are text",
    "limit_mm_per_prompt": "prompts are text",
    "mm_processor_kwargs": "prompts are text",
    "disable_mm_preprocessor_cache": "prompts are text",
    "hf_token": "the hub's own HF_TOKEN is used",
}

_LORA = Refused((False,), "LoRA adapters are not there yet; merge one into the weights.")

REFUSED: Mapping[str, Refused] = {
    "pipeline_parallel_size": Refused(
        (1,),
        "layers are not spread over devices; tensor_parallel_size splits each of them instead.",
    ),
    "data_parallel_size": Refused((1,), "there is one replica; start a server for each."),
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
