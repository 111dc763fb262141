"""The configuration itself: defaults, rules, checks across fields."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from outrider.config import (
    SECTIONS,
    CacheConfig,
    DraftConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculationConfig,
    TargetConfig,
    find_setting,
    settings,
)
from outrider.config.rules import FieldError, Rule, choice, whole
from outrider.errors import ConfigError

MODEL = "a bundled model's name, a checkpoint folder, a .gguf file or a hub id"
PROPOSERS = "'auto' or 'draft' or 'ngram' or 'eagle3' or 'medusa' or 'mlp_speculator'"
DTYPE = "'auto', 'float32', 'bfloat16' or 'float16'"
QUANTIZATION = "'fp8' or 'int8', or unset"
DEVICE = "'auto', 'cpu', 'cuda' or 'cuda:N'"

WRONG_VALUES = [
    ("target.model", "", MODEL),
    ("target.tokenizer", "", "a bundled model's name, a folder or a hub id, or unset"),
    ("target.revision", "", "a branch, tag or commit of the hub, or unset"),
    ("target.dtype", "int8", DTYPE),
    ("target.quantization", "int4", QUANTIZATION),
    ("target.device", "tpu", DEVICE),
    ("target.device", "cuda:x", DEVICE),
    ("target.tensor_parallel", 0, "a whole number >= 1"),
    ("target.max_model_len", 0, "a whole number >= 1, or unset"),
    ("draft.model", 7, f"{MODEL}, or unset"),
    ("draft.revision", "", "a branch, tag or commit of the hub, or unset"),
    ("draft.dtype", None, DTYPE),
    ("draft.quantization", "", QUANTIZATION),
    ("draft.device", "cpu:0", DEVICE),
    ("draft.tensor_parallel", 1.0, "a whole number >= 1"),
    ("head.model", "", "a checkpoint folder or a hub id, or unset"),
    ("head.revision", "", "a branch, tag or commit of the hub, or unset"),
    ("head.method", "eagle", "'auto', 'eagle3', 'medusa' or 'mlp_speculator'"),
    ("speculation.method", "eagle", f"{PROPOSERS}, or unset"),
    (
        "speculation.policy",
        "auto",
        "'goodput', 'threshold', 'trim', 'fixed' or 'off'",
    ),
    ("speculation.num_speculative_tokens", 33, "a whole number from 0 to 32, or unset"),
    ("speculation.num_speculative_tokens", True, "a whole number from 0 to 32, or unset"),
    ("speculation.verification", "typical", "'shared' or 'rejection'"),
    ("speculation.draft_ahead", "sometimes", "'auto', 'on' or 'off'"),
    ("speculation.ngram_min", 0, "a whole number >= 1"),
    ("speculation.ngram_max", "4", "a whole number >= 1"),
    ("cache.block_size", 48, "a power of two from 1 to 256"),
    ("cache.kv_cache_gb", 0, "a number > 0, or unset"),
    ("cache.kv_cache_gb", float("inf"), "a number > 0, or unset"),
    ("cache.gpu_memory_utilization", 1.1, "a number in (0, 1]"),
    ("cache.prefix_caching", 1, "true or false"),
    ("cache.prefix_sharing", "nobody", "'group' or 'all'"),
    ("scheduler.max_num_seqs", -1, "a whole number >= 1, or unset"),
    ("scheduler.max_num_batched_tokens", 0, "a whole number >= 1, or unset"),
    ("scheduler.step_limit_ms", 0, "a number > 0, or unset"),
    ("scheduler.lag", 2, "a whole number from 0 to 1, or unset"),
    ("scheduler.priority_aging_s", float("nan"), "a number > 0"),
    ("scheduler.max_waiting", 0, "a whole number >= 1, or unset"),
    ("server.host", " ", "an address to listen on"),
    ("server.port", 65536, "a whole number from 0 to 65535"),
    ("server.grpc_port", -1, "a whole number from 0 to 65535"),
    ("server.admin_port", 65536, "a whole number from 0 to 65535, or unset"),
    ("server.processes", -1, "a whole number from 0 to 64"),
    ("server.controllers", ("",), "addresses as host:port, with commas between them"),
    ("server.model_names", ("",), "names, with commas between them"),
    ("server.generation_config", "vllm", "'auto' or 'none'"),
    ("server.chat_template", "", "the path of a file, or unset"),
    ("server.allow_client_templates", "yes", "true or false"),
    ("server.page", "no", "true or false"),
    ("server.api_key", " ", settings()["server.api_key"].rule.expected),
    ("server.api_keys_file", 7, "the path of a file, or unset"),
    ("server.allow_anonymous", 1, "true or false"),
    ("server.tls_cert", "", "the path of a file, or unset"),
    ("server.tls_key", "", "the path of a file, or unset"),
    ("server.tls_client_ca", "", "the path of a file, or unset"),
    ("server.cors_origins", (1,), "origins, with commas between them"),
    ("server.max_requests", 0, "a whole number >= 1"),
    ("server.max_body_bytes", 1, "a whole number >= 1024"),
    ("server.max_prompt_tokens", 0, "a whole number >= 1, or unset"),
    ("server.max_samples", 129, "a whole number from 1 to 128"),
    ("server.max_logprobs", 51, "a whole number from 0 to 50"),
    ("server.max_streams_per_connection", 0, "a whole number >= 1"),
    ("server.max_connections_per_address", -1, "a whole number >= 0, or unset"),
    (
        "server.trusted_proxies",
        ("a",),
        "addresses or networks such as 10.0.0.0/8, with commas between them",
    ),
    ("server.max_connection_age_s", 0, "a number > 0, or unset"),
    ("server.max_connection_grace_s", 0, "a number > 0"),
    ("server.header_timeout_s", 0, "a number > 0"),
    ("server.queue_timeout_s", 0, "a number > 0"),
    ("server.resume_window_s", -1.0, "a number > 0"),
    ("server.max_resumable", -1, "a whole number >= 0"),
    ("server.drain_s", -1, "a number >= 0"),
    ("server.unknown_fields", "drop", "'warn' or 'refuse'"),
    ("server.vllm_metrics", "yes", "true or false"),
    ("server.log_prompts", "yes", "true or false"),
    ("cluster.address", "", "the address of a Ray cluster, or unset"),
    ("cluster.ray_timeout_s", -1.0, "a number >= 0"),
    ("cluster.replicas", 0, "a whole number from 1 to 256"),
    ("cluster.first_replica", -1, "a whole number from 0 to 65535"),
    ("cluster.listen", "", settings()["cluster.listen"].rule.expected),
    ("cluster.target_labels", (1,), settings()["cluster.target_labels"].rule.expected),
    ("cluster.draft_labels", (1,), settings()["cluster.draft_labels"].rule.expected),
    ("cluster.placement_timeout_s", 0, "a number > 0"),
    ("cluster.start_timeout_s", -1.0, "a number > 0"),
    ("cluster.standby", "maybe", "true or false"),
    ("cluster.colocate", "both", "true or false, or unset"),
    ("workers", "threads", "'auto', 'inline' or 'processes'"),
    ("deterministic", "yes", "true or false"),
    ("seed", 2**64, "a 64-bit whole number, or unset"),
    ("cpu_kernels", "mkl", "'auto', 'c' or 'torch'"),
    ("num_threads", 0, "a whole number >= 1, or unset"),
    ("stall_timeout_s", 0.0, "a number > 0"),
    ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ("log_format", "xml", "'text' or 'json'"),
]


@pytest.mark.parametrize(("path", "value", "wanted"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_setting_value_and_rule(
    path: str, value: object, wanted: str
) -> None:
    with pytest.raises(FieldError) as caught:
        EngineConfig.from_settings({path: value})
    shown = settings()[path].rule.shown(value)
    assert str(caught.value) == f"{path} is {shown}; it must be {wanted}."
    assert caught.value.paths == (path,)
    assert caught.value.exit_code == 2


def test_every_setting_has_a_wrong_value_in_the_table_above() -> None:
    assert {path for path, _, _ in WRONG_VALUES} == set(settings())


@pytest.mark.parametrize("path", settings())
def test_every_setting_has_one_sentence_of_documentation(path: str) -> None:
    doc = settings()[path].doc
    assert doc.endswith(".") and len(doc) > 15 and "\n" not in doc


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:11"])
def test_known_devices_are_accepted(device: str) -> None:
    assert TargetConfig(device=device).device == device


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_power_of_two_up_to_256_is_a_block_size(size: int) -> None:
    assert CacheConfig(block_size=size).block_size == size


def test_a_whole_number_serves_where_a_number_is_wanted() -> None:
    assert CacheConfig(kv_cache_gb=4).kv_cache_gb == 4


@pytest.mark.parametrize("depth", [0, 32])
def test_both_ends_of_the_depth_range_are_accepted(depth: int) -> None:
    assert SpeculationConfig(num_speculative_tokens=depth).num_speculative_tokens == depth


def test_a_config_cannot_be_changed_after_construction() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TargetConfig().model = "other"  # type: ignore[misc]


def test_replacing_a_field_checks_it_again() -> None:
    with pytest.raises(ConfigError, match=r"cache\.block_size is 3;"):
        dataclasses.replace(CacheConfig(), block_size=3)


def test_sections_are_told_apart_in_messages_though_their_fields_share_names() -> None:
    with pytest.raises(ConfigError, match=r"^draft\.dtype is 'int8'"):
        DraftConfig(dtype="int8")


def test_a_section_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cache is 'big'; it must be a CacheConfig\.$"):
        EngineConfig(cache="big")  # type: ignore[arg-type]


def test_an_ngram_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(
        FieldError,
        match=r"^speculation\.ngram_min is 5, above speculation\.ngram_max \(3\); "
        r"lower the first or raise the second\.$",
    ):
        SpeculationConfig(ngram_min=5, ngram_max=3)


def test_a_token_budget_below_the_number_of_requests_is_refused() -> None:
    with pytest.raises(
        FieldError,
        match=r"^scheduler\.max_num_batched_tokens is 8, below scheduler\.max_num_seqs \(9\); "
        r"raise the first or lower the second\.$",
    ):
        SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=9)


def test_a_token_budget_equal_to_the_number_of_requests_is_accepted() -> None:
    SchedulerConfig(max_num_batched_tokens=9, max_num_seqs=9)


def test_either_of_token_budget_and_number_of_requests_may_be_left_to_the_device() -> None:
    SchedulerConfig(max_num_batched_tokens=1)
    SchedulerConfig(max_num_seqs=100_000)


def test_a_flat_name_given_to_the_whole_says_where_it_belongs() -> None:
    wrong: dict[str, Any] = {"model": "big"}
    with pytest.raises(ConfigError, match=r"^model is no field .*from_kwargs\(model=\.\.\.\)"):
        EngineConfig(**wrong)
    config = EngineConfig(seed=3)
    assert copy.copy(config) == pickle.loads(pickle.dumps(config)) == config


def test_method_draft_without_a_draft_says_what_to_set() -> None:
    with pytest.raises(
        FieldError,
        match=r"^speculation\.method is 'draft' but there is no draft; set draft\.model "
        r"\(draft_model in LLM\) or choose 'ngram'\.$",
    ):
        EngineConfig(draft=DraftConfig(model=None), speculation=SpeculationConfig(method="draft"))


@pytest.mark.parametrize(
    ("method", "draft", "settled"),
    [
        (None, None, None),
        (None, "small", "draft"),
        ("draft", "small", "draft"),
        ("ngram", None, "ngram"),
        ("ngram", "small", "ngram"),
        ("auto", None, None),
        ("auto", "small", "draft"),
    ],
)
def test_the_method_in_force_follows_from_method_and_draft(
    method: str | None, draft: str | None, settled: str | None
) -> None:
    config = EngineConfig(
        draft=DraftConfig(model=draft), speculation=SpeculationConfig(method=method)
    )
    assert config.method == settled


def test_a_target_that_no_draft_was_named_for_lets_its_device_decide() -> None:
    own = EngineConfig.from_kwargs(model="m")
    assert (own.draft.model, own.speculation.method, own.method) == (None, "auto", None)
    assert EngineConfig.from_settings(own.to_settings()) == own
    for given in ({"draft_model": "none"}, {"method": "off"}):
        assert EngineConfig.from_kwargs(model="m", **given).speculation.method is None
    assert EngineConfig().method == EngineConfig.from_kwargs(method="auto").method == "draft"
    later = own.to_settings() | {"draft.model": "small"}  # as a rollout gives it one
    assert EngineConfig.from_settings(later).method == "draft"


def test_settings_cover_every_field_of_every_section() -> None:
    for section, kind in SECTIONS.items():
        for item in dataclasses.fields(kind):  # type: ignore[arg-type]
            assert f"{section}.{item.name}" in settings()


def test_a_config_survives_the_way_to_settings_and_back() -> None:
    config = EngineConfig(
        target=TargetConfig(model="m", max_model_len=9), cache=CacheConfig(block_size=8), seed=3
    )
    assert EngineConfig.from_settings(config.to_settings()) == config


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("target.modle", " Did you mean 'target.model'?"),
        ("targt.model", " Did you mean 'target.model'?"),
        ("scheduler.block_size", " Did you mean 'cache.block_size'?"),
        ("sed", " Did you mean 'seed'?"),
        ("targe", " Did you mean 'target'?"),
        ("zzz", ""),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known(path: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_setting(path)
    assert str(caught.value) == f"{path} is no setting.{hint}"


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        (whole(0), " 7 ", 7),
        (whole(0), "seven", "seven"),
        (whole(0), "none", "none"),
        (whole(0, optional=True), "none", None),
        (whole(0, optional=True), "NULL", None),
        (whole(0, optional=True), "", None),
        (Rule(float, "a number", lambda v: True), "0.5", 0.5),
        (Rule(bool, "true or false", lambda v: True), "Yes", True),
        (Rule(bool, "true or false", lambda v: True), "off", False),
        (Rule(bool, "true or false", lambda v: True), "maybe", "maybe"),
        (choice("a", "b"), "a", "a"),
    ],
)
def test_text_is_parsed_by_the_rule_of_its_setting(rule: Rule, text: str, value: object) -> None:
    parsed = rule.parse(text)
    assert parsed == value and type(parsed) is type(value)


def test_the_queue_of_a_server_has_an_end_unless_told_otherwise() -> None:
    assert EngineConfig().scheduler.max_waiting is None
    assert EngineConfig().for_server().scheduler.max_waiting == 4096
    given = EngineConfig.from_kwargs(max_waiting=7, model="m")
    assert given.for_server() == given
