"""A round of one row in one call: the drafts, confidences and KV of a round step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_model, random_prompt

from outrider.catalog.proposers import DRAFT
from outrider.kernels.ops import select_ops
from outrider.kernels.types import DraftTokens
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import (
    Proposal,
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Verdict,
)
from outrider.workers import costs
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.proposers.drafting import draft_in_one_call, ids_to_score, likely_ids
from outrider.workers.rows import RowTable
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import VerificationMode
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(OPS.packing is None, reason="no C compiler")
BLOCK, VOCAB = 4, 200
PROMPT = tuple(random_prompt(9, vocab_size=VOCAB))
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    random_model("llama-tied", vocab_size=VOCAB).bfloat16().save_pretrained(folder)
    return folder


def make_draft(
    folder: Path, mode: VerificationMode = "shared", *, at_once: bool = True
) -> DraftProposer:
    decoder = load_model(
        folder, dtype=torch.float32, device=CPU, ops=OPS, keeps_stored_format=True, narrow=True
    )
    kv = KVCache(decoder.spec, 32, BLOCK, torch.float32, CPU)
    runner = Runner(decoder, kv, 4, 64, VOCAB)
    if not at_once:
        runner.guess = lambda *_args: None  # type: ignore[method-assign]
    return DraftProposer(RowTable(4), runner, OPS, mode)


def rounds(
    draft: DraftProposer,
    params: SamplingParams,
    depths: Sequence[int],
    num_rows: int = 1,
    least: float = 0.0,
) -> list[dict[int, Proposal]]:
    """Each round all is accepted but its last draft, so that one or two tokens are new."""
    inits = tuple(
        RowInit(row, 1, SampleId(0, row), PROMPT[: 6 + row], 3, params, 5 + row)
        for row in range(num_rows)
    )
    texts = [list(init.token_ids) for init in inits]
    found: list[dict[int, Proposal]] = []
    for step, depth in enumerate(depths):
        rows = tuple(
            RowPlan(row, 1, 1, depth, depth, True, DRAFT, 0, (), 0, blocks(row), 16)
            for row in range(num_rows)
        )
        plan = StepPlan(1, step, rows, inits if step == 0 else (), least_survival=least)
        draft.follow(plan)
        found.append(dict(draft.propose(plan)))
        verdicts = []
        for row, proposal in sorted(found[-1].items()):
            drafted = len(proposal.tokens)
            kept = tuple(proposal.tokens[: drafted - 1 if step % 2 else drafted])
            own = (*kept, (7 * step + row) % VOCAB)
            base = len(texts[row])
            verdicts.append(RowVerdict(row, 1, base, drafted, drafted, len(kept), own))
            texts[row] += own
        draft.observe(Verdict(1, step, tuple(verdicts)))
    return found


def blocks(row: int) -> tuple[int, ...]:
    """Not in order, as a pool may give them."""
    return tuple(range(row * 8 + 7, row * 8 - 1, -1))


@needs_kernels
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_drafts_are_those_of_a_round_step_by_step_and_so_is_the_kv(
    params: SamplingParams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, by_steps = make_draft(folder), make_draft(folder, at_once=False)
    depths = (1, 2, 1, 3, 4, 2, 1, 4)
    expected = rounds(by_steps, params, depths)
    passes: list[Sequence[RowChunk]] = []
    original = Runner.forward

    def forward(self: Runner, chunks: Sequence[RowChunk], **options: Any) -> torch.Tensor:
        passes.append(chunks)
        return original(self, chunks, **options)

    monkeypatch.setattr(Runner, "forward", forward)
    found = rounds(at_once, params, depths)
    assert len(passes) <= 5  # until passes over one, two and six tokens are recorded
    for own, wanted in zip(found, expected, strict=True):
        assert list(own[0].tokens) == list(wanted[0].tokens)
        assert own[0].confidences == pytest.approx(wanted[0].confidences, rel=1e-4)
    kv, other = at_once.runner.kv, by_steps.runner.kv
    for mine, theirs in zip((*kv.keys, *kv.values), (*other.keys, *other.values), strict=True):
        assert torch.equal(mine, theirs)


@needs_kernels
@pytest.mark.parametrize(
    ("params", "mode", "num_rows"),
    [
        (SamplingParams(temperature=0.8, top_p=0.9), "shared", 1),
        (SamplingParams(temperature=0, logit_bias={3: 5.0}), "shared", 1),
        (DRAWN, "rejection", 1),
        (GREEDY, "shared", 2),
    ],
    ids=["filtered", "biased", "rejection", "two rows"],
)
def test_what_one_call_cannot_do_is_done_step_by_step(
    params: SamplingParams, mode: VerificationMode, num_rows: int, folder: Path
) -> None:
    at_once, by_steps = make_draft(folder, mode), make_draft(folder, mode, at_once=False)
    depths = (2, 1, 3, 2)
    found = rounds(at_once, params, depths, num_rows)
    for own, wanted in zip(found, rounds(by_steps, params, depths, num_rows), strict=True):
        assert own.keys() == wanted.keys() == set(range(num_rows))
        for row, proposal in own.items():
            assert list(proposal.tokens) == list(wanted[row].tokens)
            assert (proposal.q is None) == (mode == "shared")


@needs_kernels
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "step by step"])
def test_a_draft_that_is_too_unlikely_is_the_last(at_once: bool, folder: Path) -> None:
    depths = (4, 4, 4, 4)
    unlimited = rounds(make_draft(folder), GREEDY, depths)[0][0]
    first, second = unlimited.confidences[:2]
    draft = make_draft(folder, at_once=at_once)
    found = rounds(draft, GREEDY, depths, least=first * (1 + second) / 2)
    assert found[0][0].tokens == unlimited.tokens[:2]
    for each in found:
        *before, last = accumulate(each[0].confidences, mul)
        assert all(survival >= first * (1 + second) / 2 for survival in before)
        assert last < first * (1 + second) / 2 or len(before) == 3


@needs_kernels
def test_a_row_without_a_block_for_what_it_drafts_is_refused(folder: Path) -> None:
    runner = make_draft(folder).runner
    runner.extend_table(0, 0, blocks(0))
    for tokens in ((1,), (1, 2)):
        runner.forward([RowChunk(0, 0, tokens)])
    guessed = runner.guess(RowChunk(0, 0, (1, 2)), 3, VOCAB)
    assert guessed is not None
    assert len(guessed.tokens) == len(guessed.confidences) == 3
    with pytest.raises(IndexError, match="block"):
        runner.guess(RowChunk(0, 62, (1, 2)), 2, VOCAB)
    with pytest.raises(IndexError, match="row"):
        runner.guess(RowChunk(0, 0, (VOCAB,)), 1, VOCAB)


@needs_kernels
@pytest.mark.parametrize("num_ids", [1, 50, VOCAB])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_guessed_among_the_first_ids_alone(
    num_ids: int, temperature: float, folder: Path
) -> None:
    runner = make_draft(folder).runner
    runner.extend_table(0, 0, blocks(0))
    runner.forward([RowChunk(0, 0, (5,))])
    found = runner.guess(RowChunk(0, 0, (5,)), 6, num_ids, 0.0, temperature, 3)
    assert found is not None and len(found.tokens) == 6
    assert max(found.tokens) < num_ids
    text = [5]
    for token, confidence in zip(found.tokens, found.confidences, strict=True):
        hidden = runner.forward([RowChunk(0, len(text) - 1, (text[-1],))])
        scores = runner.logits(hidden, [0])[0, :num_ids] / (temperature or 1.0)
        assert confidence == pytest.approx(float(scores.softmax(-1)[token]), rel=1e-4)
        assert temperature or token == int(scores.argmax())
        text.append(token)


ENGLISH = [3, 20, 700, 4000, 90, 4100] * 40


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (ENGLISH, 8192),
        ([*ENGLISH, *[40_000] * 15], 8192),  # 6 %
        ([*ENGLISH, *[40_000] * 20], 40_960),
        ([40_000] * 400 + ENGLISH + ENGLISH, 8192),  # what is long past
        ([3] * 31, 49_152),  # too little to tell
        ([3] * 32, 4096),
        ([49_151] * 32, 49_152),
    ],
)
def test_ids_are_likely_that_most_of_the_text_has(tokens: list[int], expected: int) -> None:
    assert likely_ids(tokens, 49_152) == expected
    assert likely_ids(tokens, 4000) == 4000


@pytest.mark.parametrize(
    ("params", "mode", "expected"),
    [
        (GREEDY, "shared", 8192),
        (GREEDY, "rejection", 8192),
        (DRAWN, "shared", 8192),
        (DRAWN, "rejection", 49_152),
        (SamplingParams(temperature=0.8, top_k=3), "shared", 49_152),
        (SamplingParams(temperature=0, repetition_penalty=1.2), "shared", 49_152),
    ],
)
def test_rows_are_guessed_for_among_the_likely_ids_of_all(
    params: SamplingParams, mode: VerificationMode, expected: int
) -> None:
    usual = RowSampler(GREEDY, 0, 3, (), (), 49_152, CPU)
    own = RowSampler(params, 0, 3, (), (), 49_152, CPU)
    spans = [LogitSpan(usual, [3] * 40), LogitSpan(own, ENGLISH)]
    assert ids_to_score(spans, 49_152, mode) == expected


WIDE_VOCAB, LIKELY = 9000, 4096


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["stored", "float32"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_drafts_of_rows_with_likely_ids_are_the_best_of_these(
    num_rows: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = random_model("llama-tied", vocab_size=WIDE_VOCAB)
    model.to(dtype).save_pretrained(tmp_path)
    decoder = load_model(
        tmp_path, dtype=torch.float32, device=CPU, ops=OPS, keeps_stored_format=True
    )
    runners = [
        Runner(decoder, KVCache(decoder.spec, 64, BLOCK, torch.float32, CPU), 4, 64, WIDE_VOCAB)
        for _ in range(2)
    ]
    prompts = [random_prompt(40 + row, vocab_size=LIKELY) for row in range(num_rows)]
    params = SamplingParams(temperature=0)
    draft = DraftProposer(RowTable(4), runners[0], OPS, "shared")
    inits = tuple(
        RowInit(row, 1, SampleId(0, row), tuple(prompt), 3, params, 5)
        for row, prompt in enumerate(prompts)
    )
    table = tuple(range(16))
    rows = tuple(
        RowPlan(row, 1, 1, 2, 2, True, DRAFT, 0, (), 0, tuple(16 * row + at for at in table), 64)
        for row in range(num_rows)
    )
    plan = StepPlan(1, 0, rows, inits)
    draft.follow(plan)
    proposals = draft.propose(plan)
    is_stored = dtype is torch.bfloat16
    for row, prompt in enumerate(prompts):
        runners[1].extend_table(row, 0, table)
        first, second = proposals[row].tokens
        hidden = runners[1].forward([RowChunk(row, 0, [*prompt, first])])
        scores = runners[1].logits(hidden, [len(prompt) - 1, len(prompt)])
        among = scores[:, :LIKELY] if is_stored else scores
        assert [first, second] == among.argmax(-1).tolist()
        few = runners[1].logits(hidden, [0], LIKELY)
        assert torch.equal(few, runners[1].logits(hidden, [0])[:, : few.shape[1]])
        assert few.shape[1] == (LIKELY if is_stored else WIDE_VOCAB)


@needs_kernels
@pytest.mark.parametrize("variant", ["llama", "granite", "opt"])
def test_a_model_whose_head_is_another_weight_or_that_does_more_has_no_such_call(
    variant: str, tmp_path: Path
) -> None:
    random_model(variant).bfloat16().save_pretrained(tmp_path)
    decoder = load_model(
        tmp_path, dtype=torch.float32, device=CPU, ops=OPS, keeps_stored_format=True
    )
    assert decoder.whole_passes(KVCache(decoder.spec, 4, BLOCK, torch.float32, CPU)) is None


@needs_kernels
def test_rounds_in_one_call_are_what_is_timed_of_drafting_for_one_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, list[bool]] = {1: [], 2: []}  # by tokens of the first pass

    def guess(runner: Runner, chunk: RowChunk, *rest: Any) -> DraftTokens | None:
        guesses = draft_in_one_call(runner, chunk, *rest)
        found[len(chunk.tokens)].append(guesses is not None)
        return guesses

    monkeypatch.setattr(costs, "draft_in_one_call", guess)
    costs.measure_draft(make_draft(folder).runner, OPS)
    for tried in found.values():
        assert len(tried) > 2 and all(tried[1:])  # but for the first, which records
