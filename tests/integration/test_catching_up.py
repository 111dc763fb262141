"""A draft that is behind catches up on the device, and tells what it would have guessed.

Plans are made by hand, so that rows fall behind when and as far as they should. What is guessed and
written is decided anew from the models of `transformers` and the host's sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import damp, random_model, random_prompt, reference_logits, shorten
from gpu_tools import DEVICE, GPU_MARKS

from outrider import SamplingParams
from outrider.catalog.proposers import DRAFT
from outrider.config import EngineConfig
from outrider.engine import inline
from outrider.engine.sizing import PoolSizes
from outrider.engine.wiring import make_workers
from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.reference import ReferenceOps
from outrider.scheduler.types import (
    IN_PROCESS,
    NO_PROPOSER,
    Agreement,
    RowInit,
    RowPlan,
    SampleId,
    StepPlan,
    Verdict,
)
from outrider.workers.device import Placement
from outrider.workers.gpu.step import DeviceStep
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.runner import Runner
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler

pytestmark = [pytest.mark.model, *GPU_MARKS]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
BLOCK, MAX_LEN, DEPTH = 8, 32, 2
NUM_BLOCKS = MAX_LEN // BLOCK
# Greedy, sampled, and one whose guesses depend on what was output before.
ROWS = [
    (random_prompt(3, seed=1), SamplingParams(temperature=0)),
    (random_prompt(5, seed=2), SamplingParams(temperature=0.6, top_p=0.9)),
    (random_prompt(2, seed=3), SamplingParams(temperature=0, presence_penalty=0.5)),
]


class Engine:
    """Models, a worker over them, and plans for all of its rows."""

    def __init__(self, folder: Path) -> None:
        self.target = random_model("llama", num_hidden_layers=2, **SIZES)
        damp(self.target, 1, 0.2)
        self.draft = shorten(self.target, 1)
        self.target.save_pretrained(folder / "target")
        self.draft.save_pretrained(folder / "draft")
        config = EngineConfig.from_kwargs(
            model=str(folder / "target"),
            device=DEVICE.type,
            block_size=BLOCK,
            max_num_seqs=len(ROWS),
            max_num_batched_tokens=16,
            num_speculative_tokens=DEPTH,
        )
        placement = Placement(DEVICE, torch.float32, GpuOps())
        target, draft = (
            inline.load_decoder(str(folder / name), placement) for name in ("target", "draft")
        )
        num_blocks = len(ROWS) * NUM_BLOCKS
        pools = PoolSizes(num_blocks, num_blocks, MAX_LEN)
        workers = make_workers(config, placement, target, draft, pools, Runner).workers
        assert isinstance(workers[0], DeviceStep)
        self.worker = workers[0]
        self.inits = [_init(row, tokens, params) for row, (tokens, params) in enumerate(ROWS)]
        self.texts = [list(init.token_ids) for init in self.inits]
        self.agreements: list[Agreement] = []
        self._step = 0

    def step(self, draft_tokens: Sequence[int], depths: Sequence[int] = (0, 0, 0)) -> Verdict:
        """One more token for each row, and accepted drafts."""
        self._step += 1
        is_first = self._step == 1
        rows = [
            self._row(row, draft_tokens[row], depths[row], is_first) for row in range(len(ROWS))
        ]
        admitted = tuple(self.inits) if is_first else ()
        plan = StepPlan(0, self._step, tuple(rows), admitted)
        verdict = self.worker.verify(plan, self.worker.propose(plan)).wait()
        for each in verdict.rows:
            self.texts[each.row] += each.tokens
        self.agreements += verdict.agreements
        return verdict

    def _row(self, row: int, draft_tokens: int, depth: int, is_first: bool) -> RowPlan:
        blocks = tuple(range(row * NUM_BLOCKS, (row + 1) * NUM_BLOCKS)) if is_first else ()
        return RowPlan(
            row=row,
            generation=7,
            num_tokens=len(self.texts[row]) if is_first else 1,
            depth=depth,
            num_verified=depth,
            samples=True,
            proposer=DRAFT if depth else NO_PROPOSER,
            target_start=0,
            target_blocks=blocks,
            draft_start=0,
            draft_blocks=blocks,
            draft_tokens=draft_tokens,
        )

    def choice(self, model: Any, row: int, prefix: Sequence[int]) -> int:
        """The token behind `prefix`, decided by a model and the sampler on the host."""
        logits = reference_logits(model, prefix)[-1:]
        sampler = RowSampler.from_init(self.inits[row], logits.shape[1], torch.device("cpu"))
        return int(sample(logits, [LogitSpan(sampler, prefix)], ReferenceOps())[0])


def _init(row: int, tokens: list[int], params: SamplingParams) -> RowInit:
    return RowInit(
        row=row,
        generation=7,
        sample_id=SampleId(IN_PROCESS, row),
        token_ids=tuple(tokens),
        prompt_len=len(tokens),
        params=params,
        seed=40 + row,
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Rows whose draft is behind: one has seen its prompt, the others nothing."""
    engine = Engine(tmp_path_factory.mktemp("catch_up"))
    engine.step([3, 0, 0])
    for _ in range(6):
        engine.step([0, 0, 0])
    behind = [len(text) for text in engine.texts]
    engine.step([behind[0] - 3, behind[1], behind[2]])
    assert not engine.agreements, "nobody waits for it"
    return engine


def test_agreement_is_what_the_draft_would_have_guessed(engine: Engine) -> None:
    """Told with the next verdict, for all output but the first token, whose guess a prompt ends
    with. Penalised rows have none."""
    lengths = [len(text) for text in engine.texts]
    draft_tokens = [length - computed for length, computed in zip(lengths, (9, 11, 8), strict=True)]
    assert draft_tokens == [2, 2, 2], "the last step wrote one token, and so does this one"
    verdict = engine.step(draft_tokens, depths=(2, 2, 1))
    assert [(each.row, each.generation) for each in engine.agreements] == [(0, 7), (1, 7)]
    for row, _, hits in engine.agreements:
        text, prompt_len = engine.texts[row], len(engine.inits[row].token_ids)
        guesses = [
            engine.choice(engine.draft, row, text[:at])
            for at in range(prompt_len + 1, lengths[row])
        ]
        expected = [guess == text[at] for at, guess in enumerate(guesses, start=prompt_len + 1)]
        assert list(hits) == expected
    both = [hit for each in engine.agreements for hit in each.hits]
    assert 0 < sum(both) < len(both), "the draft is right and wrong"

    # With what it has caught up on, it drafts as it should.
    drafts = engine.worker._state.text.drafts.tolist()
    for row, depth in enumerate((2, 2, 1)):
        prefix = engine.texts[row][: lengths[row]]
        assert verdict.rows[row].base_len == lengths[row]
        for draft in drafts[row][:depth]:
            assert engine.choice(engine.draft, row, prefix) == draft
            prefix.append(draft)


def test_measuring_what_passes_cost_changes_no_text_and_no_kv(engine: Engine) -> None:
    worker = engine.worker
    draft = worker._proposers.of(DRAFT)
    assert isinstance(draft, DraftProposer)
    text = worker._state.text
    caches = [runner.kv for runner in (worker._target.runner, draft.runner)]
    kept = [text.tokens, text.lengths, text.drafts, text.draft_computed]
    kept += [part for kv in caches for part in (*kv.keys, *kv.values)]
    before = [part.clone() for part in kept]
    costs = worker.measure_costs()
    assert all(torch.equal(*each) for each in zip(kept, before, strict=True))
    for table in (costs.verify, costs.first_draft, costs.next_draft):
        assert table.is_padded
        assert min(table.seconds) > 0
        assert list(table.sizes) == sorted(set(table.sizes))
    assert costs.context_s > 0
    assert costs.prefill_s > 0
    assert costs.tile_tokens == worker._passes.tile_tokens
    engine.step([0, 0, 0])


def test_texts_are_those_of_the_target_alone(engine: Engine) -> None:
    for row, text in enumerate(engine.texts):
        for at in range(len(engine.inits[row].token_ids), len(text)):
            assert engine.choice(engine.target, row, text[:at]) == text[at]
