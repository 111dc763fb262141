"""A model whose logits are no numbers: its requests end with an error, never with empty text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from checkpoints import random_prompt, save_checkpoint
from fake_engine import MODEL, FakeEngine, fake_service

from outrider import LLM, SamplingParams
from outrider.client import prompt_request
from outrider.config import EngineConfig
from outrider.engine.async_engine import AsyncEngine
from outrider.errors import ModelError, OutriderError
from outrider.proto import generation_pb2_grpc
from outrider.scheduler.types import FinishReason, RequestUpdate

SENTENCE = r"the model '.*broken' computed logits that are NaN or infinite, so no token"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that computes NaN wherever token 5 has been, and a sound draft."""
    root = tmp_path_factory.mktemp("models")
    target = save_checkpoint(root / "broken")
    target.save_pretrained(root / "draft")
    with torch.no_grad():
        target.model.embed_tokens.weight[5] = float("nan")
    target.save_pretrained(root / "broken")
    return root / "broken", root / "draft"


def _llm(folders: tuple[Path, Path], **options: Any) -> LLM:
    target, draft = map(str, folders)
    return LLM(model=target, draft_model=draft, max_model_len=128, **options)


def _sound(length: int = 8) -> list[int]:
    return [token for token in random_prompt(4 * length) if token != 5][:length]


@pytest.mark.model
@pytest.mark.parametrize("policy", ["off", "fixed"])
@pytest.mark.parametrize("verification", ["shared", "rejection"])
def test_a_request_whose_logits_are_no_numbers_ends_with_an_error(
    folders: tuple[Path, Path], policy: str, verification: str
) -> None:
    bias = {5: -100.0}
    llm = _llm(folders, speculation_policy=policy, verification=verification)
    for params in (
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(seed=1, max_tokens=8),
        SamplingParams(seed=1, max_tokens=8, top_k=5, top_p=0.9),
        SamplingParams(seed=1, max_tokens=8, n=2, logprobs=2, prompt_logprobs=1),
    ):
        with pytest.raises(ModelError, match=SENTENCE):
            llm.generate([[*_sound(), 5, 7]], params)
    # What others ask for meanwhile, and afterwards, is answered.
    [answer] = llm.generate([_sound()], SamplingParams(seed=2, max_tokens=8, logit_bias=bias))
    assert answer.outputs[0].finish_reason == "length"
    scheduler = llm.engine.built.loop.scheduler
    scheduler.check_integrity()
    assert scheduler.target_pool.num_free == scheduler.target_pool.num_blocks


@pytest.mark.model
def test_what_stands_before_such_a_token_is_of_use_to_others(folders: tuple[Path, Path]) -> None:
    """Blocks of its prompt are in the cache before anything is known of its logits."""
    asked = SamplingParams(temperature=0, max_tokens=4, logit_bias={5: -100.0})
    options = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    shared, rest = _sound(124)[:16], _sound(124)[16:]
    question = [*shared, *rest[:8]]
    [expected] = LLM(model=str(folders[0]), **options).generate([question], asked)
    llm = LLM(model=str(folders[0]), **options)
    with pytest.raises(ModelError, match=SENTENCE):
        llm.generate([[*shared, 5, *rest[8:108]]], asked)
    [answer] = llm.generate([question], asked)
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.model
def test_a_draft_of_such_a_token_changes_no_text(tmp_path: Path) -> None:
    target, draft = save_checkpoint(tmp_path / "target"), save_checkpoint(tmp_path / "draft")
    with torch.no_grad():
        target.model.embed_tokens.weight[5] = float("nan")
        target.lm_head.weight[5] = target.lm_head.weight.mean(0)  # hardly ever said
        draft.lm_head.weight[5] = draft.lm_head.weight[7] * 20  # and often guessed
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    prompts = [_sound(48)[8 * i : 8 * i + 8] for i in range(6)]
    texts = []
    for policy in ("off", "fixed"):
        llm = _llm((tmp_path / "target", tmp_path / "draft"), speculation_policy=policy)
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
        texts.append([each.outputs[0].token_ids for each in answers])
    assert texts[0] == texts[1]


@pytest.mark.model
def test_processes_of_models_survive_what_they_cannot_choose_from(
    folders: tuple[Path, Path],
) -> None:
    with _llm(folders, tensor_parallel_size=2) as llm:
        for params in (SamplingParams(temperature=0), SamplingParams(seed=1, top_k=4)):
            with pytest.raises(ModelError, match=SENTENCE):
                llm.generate([[*_sound(), 5]], params)
            [answer] = llm.generate([_sound()], SamplingParams(seed=2, logit_bias={5: -100.0}))
            assert len(answer.outputs[0].token_ids) == 16


@pytest.mark.model
def test_a_stream_of_the_asynchronous_engine_ends_with_the_error(
    folders: tuple[Path, Path],
) -> None:
    async def read(engine: AsyncEngine, prompt: list[int]) -> int:
        params = SamplingParams(seed=3, max_tokens=4, n=2, logit_bias={5: -100.0})
        return len([each async for each in engine.generate("a", prompt, params)])

    config = EngineConfig.from_kwargs(model=str(folders[0]), max_model_len=128)
    engine = AsyncEngine.from_config(config)
    try:
        with pytest.raises(ModelError, match=SENTENCE):
            asyncio.run(read(engine, [*_sound(), 5]))
        assert asyncio.run(read(engine, _sound())) > 0
    finally:
        engine.close()


def test_clients_are_told_by_status_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: FakeEngine, running: Any) -> RequestUpdate:
        return RequestUpdate(running.sample_id, finish_reason=FinishReason.ERROR)

    monkeypatch.setattr(FakeEngine, "_advance", fail)
    with fake_service(tmp_path) as service:
        with pytest.raises(OutriderError, match=f"the model '{MODEL}' computed logits that are"):
            service.client.generate("a")
        with grpc.insecure_channel(service.server.grpc_address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            with pytest.raises(grpc.RpcError) as failure:
                stub.GenerateOnce(prompt_request("a"), timeout=10)
        assert failure.value.code() is grpc.StatusCode.INTERNAL
