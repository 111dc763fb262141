"""The flat names of `LLM(...)`, and the code a vLLM user brings along."""

from pathlib import Path
from typing import Any

import pytest

from outrider.checkpoints.resolve import BUNDLED_DRAFT
from outrider.config import EngineConfig, settings
from outrider.config.kwargs import PATHS
from outrider.errors import ConfigError


def test_nothing_given_is_the_default_configuration() -> None:
    assert EngineConfig.from_kwargs() == EngineConfig()


def test_the_bundled_target_has_the_bundled_draft() -> None:
    assert EngineConfig().draft.model == BUNDLED_DRAFT
    assert EngineConfig().method == "draft"


def test_none_keeps_the_default_of_any_name() -> None:
    assert EngineConfig.from_kwargs(**dict.fromkeys(PATHS)) == EngineConfig()


@pytest.mark.parametrize(
    "options",
    [
        {"model": "big"},
        {"draft_model": "none"},
        {"method": "ngram"},
        {"method": "off"},
        {"speculative_model": "[ngram]"},
    ],
    ids=str,
)
def test_the_bundled_draft_is_for_the_bundled_target_when_nobody_says_otherwise(
    options: dict[str, Any],
) -> None:
    assert EngineConfig.from_kwargs(**options).draft.model is None


def test_the_bundled_draft_may_be_asked_for_by_the_method() -> None:
    assert EngineConfig.from_kwargs(method="draft").draft.model == BUNDLED_DRAFT


def test_a_draft_and_no_method_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="draft_model is 'small' and method is 'off', but both"):
        EngineConfig.from_kwargs(draft_model="small", method="off")


def test_every_setting_has_a_flat_name_and_every_flat_name_a_setting() -> None:
    assert set(PATHS.values()) == set(settings())


SAMPLES = {
    "model": "big",
    "tokenizer": "its-tokenizer",
    "revision": "v1",
    "dtype": "bfloat16",
    "quantization": "fp8",
    "device": "cuda:1",
    "tensor_parallel_size": 2,
    "max_model_len": 128,
    "draft_model": "small",
    "speculative_model": "small",
    "draft_revision": "v2",
    "head_model": "my/head",
    "head_revision": "v3",
    "head_method": "medusa",
    "draft_dtype": "float16",
    "draft_quantization": "int8",
    "draft_device": "cpu",
    "draft_tensor_parallel_size": 3,
    "speculative_draft_tensor_parallel_size": 3,
    "method": "ngram",
    "speculation_policy": "trim",
    "num_speculative_tokens": 3,
    "verification": "rejection",
    "draft_ahead": "off",
    "ngram_min": 3,
    "ngram_max": 7,
    "ngram_prompt_lookup_min": 3,
    "ngram_prompt_lookup_max": 7,
    "block_size": 32,
    "kv_cache_gb": 1.5,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "prefix_sharing": "all",
    "max_num_seqs": 7,
    "max_num_batched_tokens": 99,
    "step_limit_ms": 20.0,
    "lag": 1,
    "priority_aging_s": 2.5,
    "max_waiting": 5,
    "host": "0.0.0.0",
    "port": 50052,
    "grpc_port": 50053,
    "admin_port": 9000,
    "served_model_name": ("mine", "ours"),
    "gateway_processes": 3,
    "controllers": ("10.0.0.1:50060",),
    "generation_config": "none",
    "chat_template": "chat.jinja",
    "allow_client_templates": True,
    "page": False,
    "api_key": "a-key",
    "api_keys_file": "keys.yaml",
    "allow_anonymous": True,
    "cors_origins": ("https://example.org",),
    "max_requests": 7,
    "max_body_bytes": 2048,
    "max_prompt_tokens": 100,
    "max_samples": 4,
    "max_logprobs": 5,
    "max_streams_per_connection": 8,
    "max_connections_per_address": 6,
    "trusted_proxies": ("10.0.0.0/8",),
    "max_connection_age_s": 60.0,
    "max_connection_grace_s": 30.0,
    "header_timeout_s": 2.0,
    "queue_timeout_s": 3.0,
    "resume_window_s": 4.0,
    "max_resumable": 9,
    "drain_s": 1.0,
    "unknown_fields": "refuse",
    "vllm_metrics": False,
    "log_prompts": True,
    "ray_address": "auto",
    "replicas": 2,
    "listen": "0.0.0.0:50060",
    "target_labels": ("zone=a",),
    "draft_labels": ("zone=b",),
    "placement_timeout_s": 5.0,
    "start_timeout_s": 6.0,
    "ray_timeout_s": 5.0,
    "first_replica": 3,
    "standby": False,
    "colocate": True,
    "workers": "processes",
    "deterministic": True,
    "seed": 42,
    "cpu_kernels": "torch",
    "num_threads": 1,
    "stall_timeout_s": 2.5,
    "log_level": "debug",
    "log_format": "json",
}
TOGETHER = ("tls_cert", "tls_key", "tls_client_ca")  # none of them makes sense alone


@pytest.mark.parametrize("name", [name for name in PATHS if name not in TOGETHER])
def test_a_flat_name_sets_its_setting_and_no_other(name: str) -> None:
    config = EngineConfig.from_kwargs(**{name: SAMPLES[name]})
    unasked = EngineConfig().to_settings()
    changed = {p: v for p, v in config.to_settings().items() if v != unasked[p]}
    leaves_out_draft = name in ("model", "method", "head_model")
    without_draft: dict[str, Any] = {"draft.model": None} if leaves_out_draft else {}
    if name == "model":  # who drafts for it, the device decides
        without_draft["speculation.method"] = "auto"
    assert changed == {PATHS[name]: SAMPLES[name]} | without_draft


def test_vllms_draft_model_snippet_is_understood() -> None:
    config = EngineConfig.from_kwargs(
        model="facebook/opt-6.7b",
        tensor_parallel_size=1,
        speculative_model="facebook/opt-125m",
        num_speculative_tokens=5,
        use_v2_block_manager=True,
    )
    assert (config.target.model, config.draft.model) == ("facebook/opt-6.7b", "facebook/opt-125m")
    assert config.method == "draft"


def test_vllms_ngram_snippet_is_understood() -> None:
    config = EngineConfig.from_kwargs(
        model="facebook/opt-6.7b",
        tensor_parallel_size=1,
        speculative_model="[ngram]",
        num_speculative_tokens=5,
        ngram_prompt_lookup_max=4,
        use_v2_block_manager=True,
    )
    assert config.method == "ngram"
    assert config.draft.model is None
    assert config.speculation.ngram_max == 4


def test_vllms_snippet_with_a_smaller_draft_group_is_understood() -> None:
    config = EngineConfig.from_kwargs(
        model="meta-llama/Meta-Llama-3.1-70B-Instruct",
        tensor_parallel_size=4,
        speculative_model="ibm-fms/llama3-70b-accelerator",
        speculative_draft_tensor_parallel_size=1,
        gpu_memory_utilization=0.8,
        seed=42,
    )
    assert (config.target.tensor_parallel, config.draft.tensor_parallel) == (4, 1)


def test_vllms_speculative_config_is_understood() -> None:
    config = EngineConfig.from_kwargs(
        model="facebook/opt-6.7b",
        speculative_config={
            "model": "facebook/opt-125m",
            "method": "draft_model",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 2,
        },
    )
    assert config.draft.model == "facebook/opt-125m"
    assert config.draft.tensor_parallel == 2
    assert config.speculation.num_speculative_tokens == 3
    assert config.method == "draft"


def test_vllms_speculative_config_for_ngram_is_understood() -> None:
    config = EngineConfig.from_kwargs(
        model="facebook/opt-6.7b",
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 3,
            "prompt_lookup_max": 6,
        },
    )
    assert config.method == "ngram"
    assert (config.speculation.ngram_min, config.speculation.ngram_max) == (3, 6)


@pytest.mark.parametrize(
    ("word", "dtype"), [("half", "float16"), ("float", "float32"), ("bf16", "bfloat16")]
)
def test_vllms_words_for_dtypes_are_understood(word: str, dtype: str) -> None:
    config = EngineConfig.from_kwargs(dtype=word, draft_dtype=word)
    assert (config.target.dtype, config.draft.dtype) == (dtype, dtype)


def test_torch_dtypes_and_devices_become_their_names() -> None:
    torch = pytest.importorskip("torch")
    config = EngineConfig.from_kwargs(dtype=torch.bfloat16, device=torch.device("cuda", 1))
    assert (config.target.dtype, config.target.device) == ("bfloat16", "cuda:1")


def test_a_path_object_may_name_a_model() -> None:
    assert EngineConfig.from_kwargs(model=Path("models/big")).target.model == "models/big"


def test_two_names_of_one_setting_may_agree() -> None:
    config = EngineConfig.from_kwargs(draft_model="small", speculative_model="small")
    assert config.draft.model == "small"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"modle": "x"}, "modle is no argument of LLM. Did you mean 'model'?"),
        ({"zzz": None}, "zzz is no argument of LLM."),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be a whole number >= 1."),
        (
            {"draft_model": "a", "speculative_model": "b"},
            "draft_model is 'a' and speculative_model is 'b', but both set draft.model; "
            "give only one of them.",
        ),
        (
            {"speculative_config": "small"},
            "speculative_config is 'small'; it must be a dict such as "
            '{"model": ..., "num_speculative_tokens": 5}.',
        ),
        (
            {"speculative_config": {"modl": "small"}},
            "speculative_config has the unknown key 'modl'. Did you mean 'model'?",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 99}},
            "speculative_config['num_speculative_tokens'] is 99; "
            "it must be a whole number from 0 to 32, or unset.",
        ),
        (
            {"model": "big", "method": "draft"},
            "method is 'draft' but there is no draft; set draft.model (draft_model in LLM) "
            "or choose 'ngram'.",
        ),
        (
            {"max_num_seqs": 1000, "max_num_batched_tokens": 512},
            "max_num_batched_tokens is 512, below scheduler.max_num_seqs (1000); "
            "raise the first or lower the second.",
        ),
    ],
)
def test_a_wrong_argument_is_named_as_the_caller_wrote_it(
    kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**kwargs)
    assert str(caught.value) == message
