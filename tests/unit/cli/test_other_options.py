"""Options that are not there, as vLLM's users give them."""

from __future__ import annotations

import pytest

from outrider.cli import main


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*args])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ("--max-model-len", "2048"),
            "there is no option --max-model-len; give --set target.max_model_len=2048 instead.",
        ),
        (
            ("--gpu-memory-utilization=0.8",),
            "there is no option --gpu-memory-utilization; give --set "
            "cache.gpu_memory_utilization=0.8 instead.",
        ),
        (
            ("--no-enable-prefix-caching",),
            "there is no option --no-enable-prefix-caching; give --set "
            "cache.prefix_caching=false instead.",
        ),
        (
            ("--ssl-certfile", "cert.pem"),
            "there is no option --ssl-certfile; give --set server.tls_cert=cert.pem instead.",
        ),
        (("--dtype",), "there is no option --dtype; give --set target.dtype=VALUE instead."),
        (
            ("--enforce-eager",),
            "there is no option --enforce-eager, as passes are recorded where that pays; leave it "
            "out.",
        ),
        (
            ("--enable-lora",),
            "there is no option --enable-lora: LoRA adapters are not there yet; merge one into "
            "the weights.",
        ),
        (
            ("--data-parallel-size", "2"),
            "there is no option --data-parallel-size; give --set cluster.replicas=2 instead.",
        ),
        (
            ("--nnodes=2",),
            "there is no option --nnodes: the nodes are those of the Ray cluster; see --set "
            "cluster.address.",
        ),
        (
            ("--uvicorn-log-level", "info"),
            "there is no option --uvicorn-log-level, as log_level is the level of all logs; leave "
            "it out.",
        ),
        (
            ("--speculative-config", "{}"),
            "there is no option --speculative-config; give --draft-model, --method and "
            "--num-speculative-tokens, or --set with their settings.",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_option_of_vllms_is_answered_with_what_there_is(
    given: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "serve", *given) == f"error: {sentence}\n"


def test_a_key_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "generate", "Hello", "--api-key", "hidden")
    assert "--set server.api_key=VALUE" in text and "hidden" not in text


def test_an_option_that_nobody_knows_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--tensor-parallel-size" in told(capsys, "serve", "--tensor-paralel-size", "2")
