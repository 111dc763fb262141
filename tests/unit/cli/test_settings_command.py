"""Options of `vllm serve`, as its users give them to ours."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_page import judge, lines, vllm_options

from outrider.cli import main
from outrider.cli.vllm_options import translate
from outrider.cli.vllm_scan import KNOWN, OwnOptions, ScanResult, is_flag, scan
from outrider.config.foreign_command import LISTS, OPTIONAL, SHORT


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*args])
    assert ended.value.code == 2
    return capsys.readouterr().err


def settings(*args: str) -> dict[str, Any]:
    """Those that are not the defaults."""
    verdict = judge(["./model", *args])
    assert not verdict.refused, verdict.refused
    return verdict.settings


# -- which options there are ----------------------------------------------------------------------


@pytest.mark.parametrize("option", vllm_options()["takes"])
def test_every_option_of_vllms_has_an_answer(option: str) -> None:
    name = option[2:].replace("-", "_")
    assert option == "--config" or name in KNOWN, "map it, ignore it or refuse it"


def test_every_option_takes_what_it_takes_in_vllm() -> None:
    def takes(name: str) -> str:
        if name in LISTS:
            return "values"
        if name in OPTIONAL:
            return "a value or nothing"
        return "nothing" if is_flag(name) else "a value"

    found = {option: takes(option[2:].replace("-", "_")) for option in vllm_options()["takes"]}
    assert found == vllm_options()["takes"]


def test_short_forms_are_vllms() -> None:
    assert {short: "--" + name.replace("_", "-") for short, name in SHORT.items()} == (
        vllm_options()["short"]
    )


@pytest.mark.parametrize("line", lines(), ids=lambda line: line.source.rpartition("/")[2])
def test_no_word_of_a_public_line_is_left_unread(line: Any) -> None:
    """Every option is taken, ignored or refused, and none is taken for the model."""
    scanned = scan(line.args[1:], OwnOptions({"--port": True, "--host": True}))
    assert not scanned.unknown
    assert {word for word in scanned.args if word.startswith("-")} <= {"--port", "--host"}
    assert len(scanned.args) % 2 == 0


# -- in which forms -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "path", "value"),
    [
        ("--dtype half", "target.dtype", "float16"),
        ("--dtype=bfloat16", "target.dtype", "bfloat16"),
        ("--max-model-len 2048", "target.max_model_len", 2048),
        ("--max-model-len=32k", "target.max_model_len", 32_000),
        ("--max-model-len 128K", "target.max_model_len", 131_072),
        ("--max_model_len 25.6k", "target.max_model_len", 25_600),
        ("--max-num-batched-tokens 16k", "scheduler.max_num_batched_tokens", 16_000),
        ("--max-num-seqs 128", "scheduler.max_num_seqs", 128),
        ("--gpu-memory-utilization 0.8", "cache.gpu_memory_utilization", 0.8),
        ("--gpu_memory_utilization=0.8", "cache.gpu_memory_utilization", 0.8),
        ("--quantization fp8", "target.quantization", "fp8"),
        ("-q int8", "target.quantization", "int8"),
        ("--no-enable-prefix-caching", "cache.prefix_caching", False),
        ("-tp 2", "target.tensor_parallel", 2),
        ("-tp=2", "target.tensor_parallel", 2),
        ("-tp2", "target.tensor_parallel", 2),
        ("--tensor_parallel_size 2", "target.tensor_parallel", 2),
        ("--tensor-parallel 2", "target.tensor_parallel", 2),
        ("--data-parallel-size 2", "cluster.replicas", 2),
        ("-dp=2", "cluster.replicas", 2),
        ("-asc 2", "server.processes", 2),
        ("--block-size=64", "cache.block_size", 64),
        ("--seed -1", "seed", -1),
        ("--shutdown-timeout 30", "server.drain_s", 30.0),
        ("--shutdown-timeout 0", "server.drain_s", 0.0),
        ("--seed 1 --seed 2", "seed", 2),
        ("--enable-prefix-caching --no-enable-prefix-caching", "cache.prefix_caching", False),
        ("--served-model-name a b", "server.model_names", ("a", "b")),
        ("--served_model_name=a", "server.model_names", ("a",)),
        ('--allowed-origins ["https://a"]', "server.cors_origins", ("https://a",)),
        ("--trust-request-chat-template", "server.allow_client_templates", True),
        ("--generation-config vllm", "server.generation_config", "none"),
        ("--spec-tokens 3", "speculation.num_speculative_tokens", 3),
        ("--spec-method ngram", "speculation.method", "ngram"),
        ("--spec-model draft", "draft.model", "draft"),
        ("-sc.method ngram", "speculation.method", "ngram"),
        ("--speculative-config.prompt_lookup_max=3", "speculation.ngram_max", 3),
        ("--speculative_config.num_speculative_tokens 3", "speculation.num_speculative_tokens", 3),
        ("--kv-cache-gb 2", "cache.kv_cache_gb", 2.0),
    ],
)
def test_an_option_that_stands_for_a_setting_sets_it(given: str, path: str, value: Any) -> None:
    assert settings(*given.split(" ")) == {path: value}


@pytest.mark.parametrize("given", ["--max-model-len auto", "--max-model-len -1", "-O3", "-O 2"])
def test_what_leaves_it_to_the_server_changes_nothing(given: str) -> None:
    assert settings(*given.split()) == {}


def test_keys_with_dots_and_json_are_one_value() -> None:
    wanted = {
        "draft.model": "small",
        "draft.tensor_parallel": 2,
        "speculation.method": "draft",
        "speculation.num_speculative_tokens": 5,
    }
    given = (
        '{"model": "small", "method": "draft_model", "num_speculative_tokens": 5, '
        '"draft_tensor_parallel_size": 2}'
    )
    assert settings("--speculative-config", given) == wanted
    dotted = "-sc.model small -sc.method draft_model -sc.num_speculative_tokens 5"
    assert settings(*dotted.split(), "-sc.draft_tensor_parallel_size=2") == wanted


def test_words_behind_an_option_of_several_belong_to_it() -> None:
    own = OwnOptions({"--port": True})
    given = "big --allowed-media-domains a b --port 1 --hf-token -tp 2"
    scanned = scan(given.split(), own)
    assert scanned.args == ["big", "--port", "1"]
    assert [(each.written, each.value) for each in scanned.found] == [
        ("--allowed-media-domains", ["a", "b"]),
        ("--hf-token", True),
        ("-tp", "2"),
    ]


def test_values_that_look_like_options_stay_with_our_own() -> None:
    own = OwnOptions({"--set": True, "-m": True})
    given = "--set target.max_model_len=1 -m --dtype -- --dtype"
    assert scan(given.split(), own) == ScanResult(args=given.split())


def test_what_is_given_is_listed_in_one_line_and_secrets_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "generate x --dtype half --max-model-len 1k --api-key hidden --set target.model=/none"
    with pytest.raises(SystemExit):
        main([*given.split(), "--trust-remote-code", "--hf-token", "hidden"])
    [line] = [each for each in capsys.readouterr().err.splitlines() if "as settings" in each]
    assert "--dtype half is target.dtype=float16" in line
    assert "--max-model-len 1k is target.max_model_len=1000" in line
    assert "--api-key (not shown) is server.api_key=(not shown)" in line


# -- what is not taken ----------------------------------------------------------------------------


def test_what_has_no_effect_is_warned_of_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--disable-uvicorn-access-log --enforce-eager --tool-call-parser hermes --swap-space 4 "
        "--quantization compressed-tensors"
    )
    with pytest.raises(SystemExit):
        main(["generate", "x", "-m", "/none", *given.split(), "--hf-token", "hidden"])
    error = capsys.readouterr().err
    [line] = [each for each in error.splitlines() if "without effect" in each]
    for name, reason in (
        ("--disable-uvicorn-access-log", "the access log is our own"),
        ("--enforce-eager", "passes are captured where that pays"),
        ("--tool-call-parser", "requests that bring tools are refused one by one"),
        ("--quantization", "the checkpoint itself says how it is quantized"),
        ("--swap-space", "a request that is preempted is computed again"),
    ):
        assert f"{name} ({reason})" in line
    assert "hidden" not in error and "model '/none' is not there" in error


def test_all_that_is_refused_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "serve ./big --kv-cache-dtype fp8 --enable-lora -pp 2 --quantization gguf --dtype int3 "
        "--max-model-len long --speculative-config.method mtp --nnodes=2 --host 0.0.0.0"
    )
    error = said(capsys, *given.split(), "--hf-overrides", '{"a": 1}').splitlines()
    assert error == [
        "error: --kv-cache-dtype fp8: KV has the target's dtype; leave it out.",
        "error: --enable-lora: LoRA adapters are not there yet; merge one into the weights.",
        "error: -pp 2: layers are not spread over devices; tensor_parallel_size splits each of "
        "them instead.",
        "error: --speculative-config.method is 'mtp'; a target's own layers for drafting (MTP) are "
        "not read; choose ngram, draft_model, eagle3, medusa or mlp_speculator.",
        "error: --nnodes 2: the nodes are those of the Ray cluster; see --set cluster.address.",
        'error: --hf-overrides {"a": 1}: a checkpoint is read as it is; change its config.json.',
        "error: --quantization is 'gguf'; checkpoints quantized so are not read; take another, "
        "or give fp8 or int8, which round whole weights when they are loaded.",
        "error: --dtype is 'int3'; it must be 'auto', 'float32', 'bfloat16' or 'float16'.",
        "error: --max-model-len is 'long'; it must be a whole number >= 1, or unset.",
        "error: server.host is '0.0.0.0', which other hosts can reach, but no API key is set; set "
        "one (--api-key, server.api_keys_file), listen on 127.0.0.1, or allow everyone with "
        "--allow-anonymous.",
    ]


@pytest.mark.parametrize(
    "given",
    [
        "--no-enable-lora --pipeline-parallel-size 1 --kv-cache-dtype auto --task generate",
        "--nnodes 1 --node-rank 0 --cpu-offload-gb 0 --reasoning-parser= --hf-overrides {}",
        '--response-role assistant --rope-theta None --allowed-methods ["*"]',
    ],
)
def test_a_refused_option_passes_when_it_asks_for_nothing(given: str) -> None:
    assert settings(*given.split()) == {}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--dtype", "--dtype has no value; give one."),
        ("-tp 2 --dtype --port 1", "--dtype has no value; give one."),
        ("--api-key one two", "--api-key has 2 values, but server.api_key is one; give one."),
        ("-sc {", "-sc { is invalid JSON: "),
        ("-sc [1]", "speculative_config is [1]; it must be a dict such as "),
        (
            "-sc.methd ngram",
            "speculative_config has the unknown key 'methd'. Did you mean 'method'",
        ),
        ("--dtype.a b", "--dtype has keys, but target.dtype is one value; give that."),
    ],
)
def test_a_value_that_cannot_be_read_is_refused(given: str, sentence: str) -> None:
    [refused] = judge(["./model", *given.split()]).refused
    assert refused.startswith(sentence)


def test_our_own_options_and_set_go_with_a_like_value_and_not_with_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    like = "--max-model-len 20 --set target.max_model_len=20"
    assert settings(*like.split()) == {"target.max_model_len": 20}
    other = "serve big --max-model-len 30 --set target.max_model_len=20"
    capsys.readouterr()
    assert said(capsys, *other.split()) == (
        "error: --set sets target.max_model_len to 20 and --max-model-len to 30; give only one of "
        "them.\n"
    )
    twice = "serve big --num-speculative-tokens 2 --speculative-config.num_speculative_tokens 3"
    assert "give only one of them" in said(capsys, *twice.split())
    twice = "serve big --spec-tokens 2 -sc.num_speculative_tokens 3"
    assert "both set speculation.num_speculative_tokens" in said(capsys, *twice.split())


def test_an_option_goes_before_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TARGET_DTYPE", "float32")
    assert settings("--dtype", "bfloat16") == {"target.dtype": "bfloat16"}


def test_unknown_options_are_refused_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "serve big --zzz --dtpye half --kv-cache-dtype fp8"
    error = said(capsys, *given.split())
    assert error.splitlines() == [
        "error: --kv-cache-dtype fp8: KV has the target's dtype; leave it out.",
        "error: there is no option --zzz.",
        "error: there is no option --dtpye. Did you mean '--dtype'?",
    ]


def test_an_error_of_the_parser_is_listed_with_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "serve big --port x --kv-cache-dtype fp8"
    foreign, own = said(capsys, *given.split()).splitlines()
    assert foreign.startswith("error: --kv-cache-dtype fp8: ")
    assert own.startswith("error: Invalid value for '--port': ")


def test_an_unknown_option_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--tensor-parallel-size" in said(capsys, "serve", "--tensor-paralel-size", "2")


def test_keys_that_differ_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["gateway", "--api-key", "topsecret1", "--set", "server.api_key=topsecret2"]
    assert "topsecret" not in said(capsys, *given)


def test_what_generates_here_has_no_replicas() -> None:
    found = translate(
        scan(["--data-parallel-size", "2"], OwnOptions({})).found, starts_server=False
    )
    assert found.values == {}
    assert found.ignored == {"--data-parallel-size": "this command starts no server"}


def test_client_certificates_are_demanded_where_vllm_demands_them() -> None:
    args = ["--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-ca-certs", "ca"]
    assert "server.tls_client_ca" not in settings(*args)
    assert settings(*args, "--ssl-cert-reqs", "2")["server.tls_client_ca"] == "ca"
