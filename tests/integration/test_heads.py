"""Heads on the target's hidden states: any of them, however it guesses, changes no text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from head_checkpoints import DEEP, save_head
from same_text import acceptance_rate, contents

from outrider import LLM, SamplingParams
from outrider.catalog.heads import HeadKind
from outrider.errors import ConfigError, ModelError
from outrider.scheduler.types import StepPlan
from outrider.workers.heads.eagle3 import Eagle3Head
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.head import HeadProposer
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.target import LocalTarget

pytestmark = pytest.mark.model

KINDS = (*HeadKind, DEEP)
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


# So little memory that not all of the prompts fit beside what is written, and chunks of prompts.
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 12,
    "max_model_len": 96,
    "kv_cache_gb": 24 * 2 * 6 * 2 * BLOCK_SIZE * 16 * 4 / 2**30,
}
OFF = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, speculation="off")
PROMPTS = [_prompt(length, length) for length in (1, 9, 17, 40, 23)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    target = save_checkpoint(folder / "target", vocab_size=VOCAB_SIZE, num_hidden_layers=6)
    heads = {kind: save_head(kind, folder / kind, target) for kind in KINDS}
    return heads | {"target": folder / "target"}


def _llm(folders: dict[str, Path], **options: Any) -> LLM:
    given = {"block_size": BLOCK_SIZE, "num_speculative_tokens": 3, "speculation_policy": "fixed"}
    return LLM(str(folders["target"]), deterministic=True, **(given | options))


def _over(ranks: int) -> dict[str, Any]:
    return {"workers": "processes", "tensor_parallel_size": ranks, "num_threads": 1}


def _slow_unless(is_kept: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if is_kept else (pytest.mark.slow,)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Iterator[list[Any]]:
    with _llm(folders) as llm:
        yield contents(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_writes_the_plain_text(
    folders: dict[str, Path], expected: list[Any], kind: str
) -> None:
    with _llm(folders, head_model=str(folders[kind])) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert contents(outputs) == expected
        assert 0 < acceptance_rate(outputs) < 1
        again = llm.generate(PROMPTS, PARAMS)  # prompts are in the cache now
        assert contents(again) == expected
        assert sum(each.metrics.num_cached_tokens for each in again) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_prompts_and_preemption_change_nothing(
    folders: dict[str, Path], expected: list[Any], kind: str
) -> None:
    with _llm(folders, head_model=str(folders[kind]), **TIGHT) as llm:
        assert contents(llm.generate(PROMPTS, PARAMS)) == expected
        scheduler = llm.engine.built.loop.scheduler
        assert scheduler.num_preemptions > 0
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


@pytest.fixture(scope="module")
def expected_over_two(folders: dict[str, Path]) -> Iterator[list[Any]]:
    with _llm(folders, **_over(2)) as llm:
        yield contents(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("ranks", "plain"),
    [
        pytest.param(1, "expected", marks=pytest.mark.slow),
        (2, "expected_over_two"),
    ],
)
def test_over_ranks_the_text_is_the_plain_one(
    folders: dict[str, Path], request: pytest.FixtureRequest, ranks: int, plain: str
) -> None:
    with _llm(folders, head_model=str(folders["eagle3"]), **_over(ranks)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert acceptance_rate(outputs) > 0
        assert contents(outputs) == request.getfixturevalue(plain)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=_slow_unless(kind == "eagle3")) for kind in HeadKind]
)
def test_preemption_and_cached_prefixes_change_nothing_over_two_ranks(
    folders: dict[str, Path], expected_over_two: list[Any], kind: str
) -> None:
    with _llm(folders, head_model=str(folders[kind]), **_over(2), **TIGHT) as llm:
        scheduler = llm.engine.built.loop.scheduler
        assert contents(llm.generate(PROMPTS, PARAMS)) == expected_over_two
        assert scheduler.num_preemptions > 0
        [first] = llm.generate([PROMPTS[3]], PARAMS[0])  # too long for what the others left
        [again] = llm.generate([PROMPTS[3]], PARAMS[0])
        assert again.metrics.num_cached_tokens > 0
        most = scheduler._planner._max_depths[kind]
        assert most == (sys.maxsize if kind == "eagle3" else 3)
        assert contents([again]) == contents([first])
        assert scheduler.stats.accepted_tokens > 0


def _play(llm: LLM, prompt: list[int], is_preempted: bool) -> list[int]:
    """The text so far of a request in row 0 that drafts, and may have lost its memory meanwhile."""
    output = llm.engine.add("one", prompt, PARAMS[1])
    made = output.outputs[0].token_ids
    scheduler = llm.engine.built.loop.scheduler
    while len(made) < 25:
        llm.engine.step()
        if is_preempted and len(made) > 10 and not scheduler.num_preemptions:
            scheduler._running_requests.preempt(scheduler._running_requests.running[0])
    assert scheduler.num_preemptions == is_preempted
    assert 0 < scheduler.stats.accepted_tokens < scheduler.stats.drafted_tokens
    return [*prompt, *made]


@pytest.mark.parametrize("case", ["fresh", "preempted", "cached", "bare", "regained"])
@pytest.mark.parametrize("kind", HeadKind)
def test_what_a_head_knows_is_what_a_fresh_pass_over_the_text_gives(
    folders: dict[str, Path], kind: str, case: str
) -> None:
    """Slots that it fed itself while it drafted are written again from the target's pass, and those
    beside a prefix that another request left are those of this text: one that is not drafted for
    leaves none."""
    with _llm(folders, head_model=str(folders[kind])) as llm:
        loop = llm.engine.built.loop
        proposer = loop._proposers.of(kind)  # type: ignore[attr-defined]
        assert isinstance(proposer, HeadProposer)
        prompt = PROMPTS[3]
        if case == "cached":
            shared, behind = prompt[: 3 * BLOCK_SIZE], prompt[3 * BLOCK_SIZE]
            llm.generate([[*shared, *[7 if behind == 6 else 6] * 9]], PARAMS[0])
        elif case in ("bare", "regained"):
            loop.scheduler.control.max_depth = 0 if case == "regained" else None
            llm.generate([prompt], PARAMS[0] if case == "regained" else OFF)
            loop.scheduler.control.max_depth = None
        text = _play(llm, prompt, case == "preempted")
        is_of_use = kind != "eagle3" or case in ("cached", "preempted")
        assert bool(loop.scheduler.num_cached_tokens) == (is_of_use and case != "fresh")
        fresh = _fresh(proposer.runner)
        fresh.target.forward([RowChunk(0, 0, text[:-1])])
        passed = fresh.target.last_pass
        assert passed is not None
        states = fresh.extend([RowChunk(0, 0, text[1:])], passed.features)
        torch.testing.assert_close(proposer.runner.states[0], states[-1], rtol=0, atol=0)


def test_a_heads_depth_is_no_limit_of_others(folders: dict[str, Path]) -> None:
    """These two have three heads and three levels; a round of n-gram lookup is as asked for."""
    for kind in (HeadKind.MEDUSA, HeadKind.MLP):
        with _llm(folders, head_model=str(folders[kind]), num_speculative_tokens=6) as llm:
            planned = _watch_depths(llm)
            repeated = [3, 4, 5, 6] * 4
            llm.generate([repeated], PARAMS[0])
            assert max(planned) == 3
            llm.generate([repeated], dataclasses.replace(PARAMS[0], speculation="ngram"))
            assert max(planned) == 6


def _watch_depths(llm: LLM) -> list[int]:
    """Those that rows are planned with from now on."""
    scheduler, depths = llm.engine.built.loop.scheduler, list[int]()
    make_plan = scheduler.plan

    def watched(now_s: float) -> StepPlan | None:
        plan = make_plan(now_s)
        depths.extend(row.depth for row in (plan.rows if plan is not None else ()))
        return plan

    scheduler.plan = watched  # type: ignore[method-assign]
    return depths


def test_a_head_without_an_embedding_shares_the_targets(folders: dict[str, Path]) -> None:
    with _llm(folders, head_model=str(folders["eagle3"])) as llm:
        proposer = llm.engine.built.loop._proposers.of("eagle3")  # type: ignore[attr-defined]
        assert isinstance(proposer, HeadProposer)
        head, target = proposer.runner.head, proposer.runner.target.decoder
        assert isinstance(head, Eagle3Head)
        assert head._embedding is target.whole_embedding


WITHOUT: list[dict[str, Any]] = [
    {"speculation": "off"},
    {"num_speculative_tokens": 0},
    {"speculation": "ngram"},
]


@pytest.mark.parametrize("kind", HeadKind)
def test_requests_that_a_head_never_drafts_for_cost_it_nothing(
    folders: dict[str, Path], expected: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_slots = 0
    extend = HeadRunner.extend

    def counted(runner: HeadRunner, chunks: Sequence[RowChunk], features: torch.Tensor) -> Any:
        nonlocal num_slots
        num_slots += sum(len(chunk.tokens) for chunk in chunks)
        return extend(runner, chunks, features)

    monkeypatch.setattr(HeadRunner, "extend", counted)
    with _llm(folders, head_model=str(folders[kind]), speculation_policy="off") as llm:
        target = llm.engine.built.loop._target
        assert isinstance(target, LocalTarget)
        kept = target.runner.decoder._taps._kept
        kept.clear()
        num_slots = 0
        for own in WITHOUT:
            asked = [dataclasses.replace(params, **own) for params in PARAMS]
            assert contents(llm.generate(PROMPTS, asked)) == expected
        if kind == "eagle3":  # others need nothing of what was before: they may begin at any token
            assert contents(llm.generate(PROMPTS, PARAMS)) == expected
        assert num_slots == 0
        assert not kept, "passes that are tapped are never the repeated ones"
        llm.engine.built.loop.scheduler.control.set_policy("fixed")
        # Of those who share a pass, the one that is drafted for costs what it does alone.
        [alone] = llm.generate([PROMPTS[3]], PARAMS[0])
        taken, num_slots = num_slots, 0
        llm.engine.built.loop.scheduler.target_pool.forget_published()
        both = llm.generate([PROMPTS[3], PROMPTS[2]], [PARAMS[0], OFF])
        assert contents(both[:1]) == contents([alone])
        assert num_slots == taken > 0


def _fresh(used: HeadRunner) -> HeadRunner:
    target, kv = used.target, used.target.kv
    own = KVCache(target.decoder.spec, 16, kv.block_size, torch.float32, "cpu")
    runner = Runner(target.decoder, own, 1, 128, VOCAB_SIZE)
    runner.extend_table(0, 0, list(range(16)))
    return HeadRunner(used.head, runner)
