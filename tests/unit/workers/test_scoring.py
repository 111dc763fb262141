"""A pass and the scores behind it in one call: what the pass and the head give one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_model, random_prompt
from torch import Tensor

import outrider
from outrider.kernels.ops import select_ops
from outrider.scheduler.types import NO_TOKEN
from outrider.workers.models.kv import KVCache
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(OPS.packing is None, reason="no C compiler")
BLOCK, VOCAB, ROWS = 4, 5000, 4  # more tokens than are searched at once
NOT_A_NUMBER, INFINITE, FIRST_TWIN, SECOND_TWIN = 7, 8, 100, 4500


def saved(folder: Path, change: Any = None) -> Path:
    model = random_model("llama-tied", vocab_size=VOCAB).bfloat16()
    if change is not None:
        with torch.no_grad():
            change(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    return folder


def make_runner(folder: Path, vocab_size: int = VOCAB) -> Runner:
    decoder = load_model(folder, dtype=torch.float32, device=CPU, ops=OPS, keeps_stored_format=True)
    runner = Runner(
        decoder, KVCache(decoder.spec, 64, BLOCK, torch.float32, CPU), ROWS, 64, vocab_size
    )
    for row in range(ROWS):
        runner.extend_table(row, 0, range(row * 16 + 15, row * 16 - 1, -1))
    return runner


def by_steps(runner: Runner, chunks: Sequence[RowChunk], wanted: Sequence[int]) -> Tensor:
    return runner.logits(runner.forward(chunks), wanted)


def known(runner: Runner, *counts: int) -> Runner:
    """Which has run passes over so many tokens."""
    for count in counts:
        runner.forward([RowChunk(0, 0, list(range(count)))])
    return runner


@needs_kernels
@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([1], [0]),
        ([4], [0, 1, 2, 3]),
        ([8], [7]),
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([3, 1, 4], [1, 2, 3, 7]),  # a prompt's chunk among them, drafts of which some count
        ([2, 2, 2], [1, 3, 5]),
    ],
)
@pytest.mark.parametrize("vocab_size", [VOCAB, 4097])
def test_scores_are_those_of_the_pass_and_the_head_bit_for_bit(
    lengths: list[int], wanted: list[int], vocab_size: int, tmp_path: Path
) -> None:
    folder = saved(tmp_path)
    at_once, stepwise = (known(make_runner(folder), sum(lengths)) for _ in range(2))
    at_once.vocab_size = vocab_size
    prompt = random_prompt(40, vocab_size=4000)
    starts = [11, 5, 9, 0]
    for row, start in enumerate(starts):
        for runner in (at_once, stepwise):
            runner.forward([RowChunk(row, 0, prompt[: start + 1])])
    for offset in range(3):
        chunks = [
            RowChunk(row, starts[row], prompt[row + offset : row + offset + length])
            for row, length in enumerate(lengths)
        ]
        scores = at_once.score(chunks, wanted)
        expected = by_steps(stepwise, chunks, wanted)[:, :vocab_size]
        assert scores is not None
        assert torch.equal(scores, expected)
        assert at_once.best(chunks, wanted) == expected.argmax(-1).tolist()
        for ours, theirs in zip(at_once.kv.keys, stepwise.kv.keys, strict=True):
            assert torch.equal(ours, theirs)


@needs_kernels
def test_what_cannot_be_chosen_from_is_said_for_its_row_alone(tmp_path: Path) -> None:
    def spoil(table: Tensor) -> None:
        table[NOT_A_NUMBER] = torch.nan

    folder = saved(tmp_path, spoil)
    runner = known(make_runner(folder), 3)
    chunks = [RowChunk(row, 0, [token]) for row, token in enumerate((20, NOT_A_NUMBER, 30))]
    # The table is the head, too: everybody's score of that token is NaN.
    assert runner.best(chunks, [0, 1, 2]) == [NO_TOKEN] * 3
    runner.vocab_size = NOT_A_NUMBER
    best = runner.best(chunks, [0, 1, 2])
    assert best is not None and best[1] == NO_TOKEN
    assert all(0 <= best[row] < NOT_A_NUMBER for row in (0, 2))


@needs_kernels
def test_a_score_that_is_no_number_is_found_wherever_it_stands(tmp_path: Path) -> None:
    for spoiled in (1, 4095, 4096, 4997, 4998, 4999):
        folder = tmp_path / str(spoiled)

        def spoil(table: Tensor, at: int = spoiled) -> None:
            table[at] = torch.nan

        runner = known(make_runner(saved(folder, spoil)), 1)
        for vocab_size in (4999, 5000):
            runner.vocab_size = vocab_size
            best = runner.best([RowChunk(0, 0, [20])], [0])
            assert (best == [NO_TOKEN]) == (spoiled < vocab_size)


@needs_kernels
def test_an_infinite_score_is_no_choice_unless_it_is_the_least(tmp_path: Path) -> None:
    def spoil(table: Tensor) -> None:
        table[INFINITE] = 3e38

    runner = known(make_runner(saved(tmp_path, spoil)), 1)
    seen = set()
    for token in range(20, 60):
        chunk = [RowChunk(0, 0, [token])]
        scores, best = runner.score(chunk, [0]), runner.best(chunk, [0])
        assert scores is not None
        score = scores[0, INFINITE].item()
        seen.add(score)
        assert (best == [NO_TOKEN]) == (score == torch.inf)
    assert {torch.inf, -torch.inf} <= seen


@needs_kernels
def test_of_equals_the_lowest_is_chosen(tmp_path: Path) -> None:
    def repeat(table: Tensor) -> None:
        table *= 0.01
        table[FIRST_TWIN] *= 1000
        table[SECOND_TWIN] = table[FIRST_TWIN]

    runner = known(make_runner(saved(tmp_path, repeat)), 1)
    found = []
    for token in range(20, 60):
        best = runner.best([RowChunk(0, 0, [token])], [0])
        assert best is not None
        found += best
    assert FIRST_TWIN in found and SECOND_TWIN not in found


@needs_kernels
def test_it_is_left_to_others_before_such_a_pass_was_run_and_for_long_ones(tmp_path: Path) -> None:
    runner = make_runner(saved(tmp_path))
    for ask in (runner.score, runner.best):
        assert ask([RowChunk(0, 0, [1, 2])], [1]) is None
    known(runner, 2, 9)
    for ask in (runner.score, runner.best):
        assert ask([RowChunk(0, 0, [1, 2])], [1]) is not None
        assert ask([RowChunk(0, 0, [1, 2])], []) is None
        assert ask([RowChunk(0, 0, list(range(9)))], [8]) is None


REQUESTS = (
    outrider.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    outrider.SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    outrider.SamplingParams(temperature=0, logprobs=2, max_tokens=12, ignore_eos=True),
    outrider.SamplingParams(
        temperature=0, repetition_penalty=1.3, prompt_logprobs=1, max_tokens=6, ignore_eos=True
    ),
)


@needs_kernels
@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_texts_and_logprobs_are_the_same_whether_or_not_it_is_used(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"score": 0, "best": 0}

    def counted(name: str) -> Any:
        original = getattr(Runner, name)

        def ask(self: Runner, *given: Any) -> Any:
            found = original(self, *given)
            used[name] += found is not None
            return found

        return ask

    def answers() -> list[Any]:
        llm = outrider.LLM(model="smollm2-135m-instruct", device="cpu", max_model_len=64)
        prompts = [{"prompt_token_ids": random_prompt(5 + i, vocab_size=4000)} for i in range(4)]
        if together:
            results = llm.generate(prompts, list(REQUESTS))
        else:
            results = [
                llm.generate([prompt], params)[0]
                for prompt, params in zip(prompts, REQUESTS, strict=True)
            ]
        return [
            (result.outputs[0].token_ids, result.outputs[0].logprobs, result.prompt_logprobs)
            for result in results
        ]

    for name in used:
        monkeypatch.setattr(Runner, name, counted(name))
    expected = answers()
    assert used["score"] > 10 and (together or used["best"] > 10)
    for name in used:
        monkeypatch.setattr(Runner, name, lambda *_args: None)
    assert answers() == expected
