"""One rule wherever a request comes in: what it leaves out gets the checkpoint's defaults."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeService, fake_facts, fake_service
from http_tools import send

from outrider import LLM, AsyncEngine, SamplingParams
from outrider.checkpoints.resolve import draft_assets
from outrider.cli import main

PROMPT = "The sky is"
DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
OPENAI = (1.0, 0, 1.0)  # temperature, top_k, top_p
CHECKPOINTS = tuple(DEFAULTS.values())


def sent_by(way: str, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    """What the engine is given of a request without sampling parameters."""
    question = [{"role": "user", "content": PROMPT}]
    match way:
        case "completions":
            assert send(service, "/v1/completions", {"prompt": PROMPT}).status == 200
        case "chat completions":
            assert send(service, "/v1/chat/completions", {"messages": question}).status == 200
        case "gRPC":
            service.client.generate(PROMPT)
        case "outrider chat":
            monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
            with pytest.raises(SystemExit):
                main(["chat", "--server", service.server.grpc_address, "--max-tokens", "2"])
    return service.engine.submitted[-1].spec.params


@pytest.mark.parametrize("way", ["completions", "chat completions", "gRPC", "outrider chat"])
def test_a_server_gives_the_checkpoints_defaults_to_every_protocol(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = dataclasses.replace(
        fake_facts(), sampling_defaults=DEFAULTS | {"max_tokens": 2}, max_model_len=64
    )
    for generation_config, expected in (("auto", CHECKPOINTS), ("none", OPENAI)):
        server = {"generation_config": generation_config}
        with fake_service(tmp_path, facts=facts, server=server) as service:
            params = sent_by(way, service, monkeypatch)
            assert (params.temperature, params.top_k, params.top_p) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose author has requests take the likeliest token, and five of them."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(draft_assets(), folder)
    settings = {"temperature": 0.6, "top_k": 1, "max_new_tokens": 5, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def greedy(checkpoint: str) -> list[int]:
    with LLM(checkpoint, kv_cache_gb=0.05) as llm:
        [found] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
        return list(found.outputs[0].token_ids)


def ids_of(outputs: Any) -> list[int]:
    [found] = outputs
    return list(found.outputs[0].token_ids)


@pytest.mark.model
def test_llm_has_them_unless_parameters_are_given_as_in_vllm(
    checkpoint: str, greedy: list[int]
) -> None:
    with LLM(checkpoint, kv_cache_gb=0.05, seed=1) as llm:
        assert ids_of(llm.generate(PROMPT)) == greedy[:5]
        assert ids_of(llm.generate(PROMPT, max_tokens=8)) == greedy
        assert ids_of(llm.chat([{"role": "user", "content": PROMPT}])) != []
        default = llm.get_default_sampling_params()
        assert (default.temperature, default.top_k, default.max_tokens) == (0.6, 1, 5)
        own = ids_of(llm.generate(PROMPT, SamplingParams(ignore_eos=True)))
        assert len(own) == 16 and own[:5] != greedy[:5]  # at temperature 1, of all tokens
    with LLM(checkpoint, kv_cache_gb=0.05, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.model
def test_an_async_engine_has_them_too(checkpoint: str, greedy: list[int]) -> None:
    async def ids() -> list[int]:
        return [
            token async for delta in engine.generate("one", PROMPT) for token in delta.token_ids
        ]

    engine = AsyncEngine(checkpoint, kv_cache_gb=0.05)
    try:
        assert asyncio.run(ids()) == greedy[:5]
    finally:
        engine.close()


@pytest.mark.model
def test_outrider_generate_has_them_too(
    checkpoint: str, greedy: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", PROMPT, "--raw", "--model", checkpoint, "--max-tokens", "8"]
    with pytest.raises(SystemExit) as left:
        main([*command, "--set", "cache.kv_cache_gb=0.05"])
    assert left.value.code == 0
    with LLM(checkpoint, kv_cache_gb=0.05) as llm:
        assert capsys.readouterr().out == llm.get_tokenizer().decode(greedy) + "\n"
