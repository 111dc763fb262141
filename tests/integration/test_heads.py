"""Heads on the target's hidden states: any of them, however it guesses, changes no text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from head_checkpoints import save_head
from same_text import acceptance_rate, contents

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError, ModelError
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.heads.spec import HeadKind
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.head import HeadProposer
from outrider.workers.runner import Chunk, Runner

pytestmark = pytest.mark.model

VOCAB_SIZE = 12  # so few that a head without sense is right now and then
BLOCK_SIZE = 8
NUM_TOKENS = 40
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.02,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0, 5: -2.0},
    "logprobs": 2,
    "n": 2,
}
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **own)
    for seed, own in enumerate(
        [
            {"temperature": 0.0},
            {"temperature": 1.0},
            EVERYTHING,
            {"temperature": 0.7, "prompt_logprobs": 1},
            {"temperature": 0.0, "presence_penalty": 1.5},
        ]
    )
]


def _prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


PROMPTS = [_prompt(length, length) for length in (1, 9, 17, 40, 23)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    target = save_checkpoint(folder / "target", vocab_size=VOCAB_SIZE, num_hidden_layers=6)
    heads = {kind: save_head(kind, folder / kind, target) for kind in HeadKind}
    return heads | {"target": folder / "target"}


def _llm(folders: dict[str, Path], **options: Any) -> LLM:
    given = {"block_size": BLOCK_SIZE, "num_speculative_tokens": 3, "speculation_policy": "fixed"}
    return LLM(str(folders["target"]), deterministic=True, **(given | options))


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Iterator[list[Any]]:
    with _llm(folders) as llm:
        yield contents(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("kind", HeadKind)
def test_every_head_writes_the_plain_text(
    folders: dict[str, Path], expected: list[Any], kind: str
) -> None:
    with _llm(folders, head_model=str(folders[kind])) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert contents(outputs) == expected
        assert 0 < acceptance_rate(outputs) < 1
        again = llm.generate(PROMPTS, PARAMS)  # prompts are in the cache now
        assert contents(again) == expected


@pytest.mark.parametrize("kind", HeadKind)
def test_chunks_of_prompts_and_preemption_change_nothing(
    folders: dict[str, Path], expected: list[Any], kind: str
) -> None:
    tight = {"max_num_batched_tokens": 12, "kv_cache_gb": 24 * 2 * 6 * 2 * 8 * 16 * 4 / 2**30}
    with _llm(folders, head_model=str(folders[kind]), max_model_len=96, **tight) as llm:
        assert contents(llm.generate(PROMPTS, PARAMS)) == expected
        scheduler = llm.engine.built.loop.scheduler
        assert scheduler._residents.num_preemptions > 0
        assert scheduler.stats.accepted_tokens > 0


def test_a_draft_that_is_a_head_is_taken_for_one(folders: dict[str, Path]) -> None:
    with _llm(
        folders, speculative_config={"method": "eagle3", "model": str(folders["eagle3"])}
    ) as llm:
        config = llm.engine.built.config
        assert (config.draft.model, config.head.model) == (None, str(folders["eagle3"]))
        assert config.method == "eagle3"
        [output] = llm.generate([PROMPTS[1]], PARAMS[0])
        assert output.outputs[0].speculation.drafted > 0


def test_a_head_that_is_none_or_another_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="is no head; name it as draft.model"):
        _llm(folders, head_model=str(folders["target"]))
    with pytest.raises(ConfigError, match="speculation.method is 'medusa' but the head is of"):
        _llm(folders, head_model=str(folders["eagle3"]), method="medusa")


def test_rejection_sampling_takes_a_heads_distribution(folders: dict[str, Path]) -> None:
    with _llm(folders, head_model=str(folders["eagle3"]), verification="rejection") as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert 0 < acceptance_rate(outputs) < 1


@pytest.mark.parametrize(("kind", "num_dropped"), [("eagle3", BLOCK_SIZE), ("medusa", 0)])
def test_of_a_cached_prefix_the_last_block_is_no_use_to_a_head_that_looks_ahead(
    folders: dict[str, Path], kind: str, num_dropped: int
) -> None:
    """What such a head keeps beside a block's last token depends on the token behind it."""
    prompt, others = _prompt(4 * BLOCK_SIZE, seed=7), _prompt(5, seed=8)
    with _llm(folders, head_model=str(folders[kind])) as llm:
        llm.generate([prompt], PARAMS[0])
        [output] = llm.generate([prompt + others], PARAMS[0])
        assert output.metrics.num_cached_tokens == 4 * BLOCK_SIZE - num_dropped


@pytest.mark.parametrize("ranks", [1, 2])
def test_over_ranks_the_text_is_the_plain_one(
    folders: dict[str, Path], expected: list[Any], ranks: int
) -> None:
    with _llm(
        folders,
        head_model=str(folders["eagle3"]),
        workers="processes",
        tensor_parallel_size=ranks,
        num_threads=1,
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert acceptance_rate(outputs) > 0
        if ranks == 1:
            assert contents(outputs) == expected
    if ranks == 2:
        with _llm(folders, workers="processes", tensor_parallel_size=2, num_threads=1) as plain:
            assert contents(plain.generate(PROMPTS, PARAMS)) == contents(outputs)


def test_what_a_head_knows_is_what_a_fresh_pass_over_the_text_gives(
    folders: dict[str, Path],
) -> None:
    """Slots that it fed itself while it drafted are written again from the target's pass."""
    with _llm(folders, head_model=str(folders["eagle3"])) as llm:
        loop = llm.engine.built.loop
        proposer = loop._proposers.of("eagle3")  # type: ignore[attr-defined]
        assert isinstance(proposer, HeadProposer)
        output = llm.engine.add("one", PROMPTS[3], PARAMS[1])
        while len(output.outputs[0].token_ids) < 25:
            llm.engine.step()
        assert 0 < loop.scheduler.stats.accepted_tokens < loop.scheduler.stats.drafted_tokens
        text = [*PROMPTS[3], *output.outputs[0].token_ids]
        fresh = _fresh(proposer.runner)
        fresh.target.forward([Chunk(0, 0, text[:-1])])
        passed = fresh.target.passed
        assert passed is not None
        states = fresh.extend([Chunk(0, 0, text[1:])], passed.features)
        torch.testing.assert_close(proposer.runner.states[0], states[-1], rtol=0, atol=0)


def _fresh(used: HeadRunner) -> HeadRunner:
    target, kv = used.target, used.target.kv
    own = KVCache(target.decoder.spec, 16, kv.block_size, torch.float32, "cpu")
    runner = Runner(target.decoder, own, 1, 128, VOCAB_SIZE)
    runner.extend_table(0, 0, list(range(16)))
    return HeadRunner(used.head, runner)
