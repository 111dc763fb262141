"""The bundled draft enlarged: the whole engine writes the small model's text with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.benchmarks.inflate import save_inflated
from outrider.benchmarks.inflate_recipes import Shape
from outrider.benchmarks.prompts import encode_question, read_questions, select_questions
from outrider.checkpoints.resolve import BUNDLED_DRAFT

pytestmark = pytest.mark.model

# Two layers more, heads twice as wide and in groups, more of everything else.
SHAPE = Shape(1024, 6, 8, 4, 128, 1280)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """The draft as it is, and enlarged."""
    folder = tmp_path_factory.mktemp("inflated") / "large"
    save_inflated(BUNDLED_DRAFT, SHAPE, folder, torch.float32)
    with (
        LLM(BUNDLED_DRAFT, kv_cache_gb=0.2) as small,
        LLM(str(folder), kv_cache_gb=0.5) as large,
    ):
        shutil.rmtree(folder)  # half a gigabyte, which pytest would keep for three runs
        yield small, large


@pytest.mark.parametrize(
    ("num_prompts", "num_tokens"), ((5, 24), pytest.param(50, 32, marks=pytest.mark.slow))
)
def test_the_enlarged_draft_writes_the_same_text(
    num_prompts: int, num_tokens: int, engines: tuple[LLM, LLM]
) -> None:
    small, large = engines
    tokenizer = small.get_tokenizer()  # the same, whose folder is still there
    questions = select_questions(read_questions(), -(-num_prompts // 5))[:num_prompts]
    prompts = [encode_question(question, tokenizer) for question in questions]
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    texts, enlarged = (
        [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
        for llm in (small, large)
    )
    assert len({tuple(text) for text in texts}) > num_prompts // 2
    assert enlarged == texts
