"""How often the outcome of a round is among the branches drafted ahead, without time limits.

    python -m outrider.benchmarks.draft_ahead_hits

The bundled target writes texts, and its draft replays them. Odds are learned on the way; the first
texts do not count.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from outrider.benchmarks.draft_ahead import DRAFT, TARGET
from outrider.benchmarks.prompts import encode_question, read_questions, select_questions
from outrider.catalog import proposers
from outrider.engine.llm import LLM
from outrider.kernels.seeds import sample_seed
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import RowInit, RowPlan, RowVerdict, SampleId, StepPlan, Verdict
from outrider.workers.device import place
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.proposers.outcome_odds import RowOutcome
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.scratch_rows import ScratchRows
from outrider.workers.weights.loader import load_model

_BLOCK, _BLOCKS, _BLOCKS_EACH = 16, 64, 3
_UNCOUNTED = 2  # texts
_TEMPERATURES = (0.0, 0.7, 1.0)


class Text(NamedTuple):
    prompt: list[int]
    output: list[int]


def written(temperature: float, num_prompts: int, num_tokens: int) -> list[Text]:
    with LLM(TARGET, seed=1) as llm:
        tokenizer = llm.get_tokenizer()
        questions = select_questions(read_questions(), per_group=8)[:num_prompts]
        prompts = [encode_question(question, tokenizer) for question in questions]
        found = [
            llm.engine.add(str(number), prompt, _params(temperature, num_tokens, number))
            for number, prompt in enumerate(prompts)
        ]
        while llm.engine.has_work:
            llm.engine.step()
        pairs = zip(prompts, found, strict=True)
        texts = [Text(prompt, list(each.outputs[0].token_ids)) for prompt, each in pairs]
    return [each for each in texts if len(each.prompt) + num_tokens < _BLOCK * _BLOCKS]


def _params(temperature: float, num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed
    )


class Replay:
    """One draft, and texts one after the other."""

    def __init__(self, temperature: float, depth: int, num_branches: int) -> None:
        self._params = SamplingParams(temperature=temperature)
        self._depth, self._num_branches = depth, num_branches
        where = place("cpu", "auto", "auto", False, "draft")
        decoder = load_model(
            DRAFT,
            dtype=where.dtype,
            device=where.device,
            ops=where.ops,
            keeps_stored_format=where.keeps_stored_format,
            narrow=True,
        )
        num_scratch = 2 * num_branches
        num_blocks = _BLOCKS + num_scratch * _BLOCKS_EACH
        is_interleaved = where.ops.supports_strided_blocks
        kv = KVCache(
            *(decoder.spec, num_blocks, _BLOCK, where.dtype, where.device),
            is_interleaved=is_interleaved,
        )
        runner = Runner(decoder, kv, 1, _BLOCK * _BLOCKS, decoder.spec.vocab_size)
        scratch = ScratchRows(runner, num_scratch, _BLOCKS_EACH)
        self._draft = DraftProposer(RowTable(1), runner, where.ops, "shared", scratch)
        self._step = 0
        self.rounds = self.hits = 0

    def run(self, number: int, text: Text, *, counts: bool) -> None:
        tokens, at = text.prompt + text.output, len(text.prompt) + 1
        seed = sample_seed(number, 0)
        init = RowInit(
            *(0, number, SampleId(0, number), tuple(tokens[:at]), len(text.prompt)),
            *(self._params, seed),
            proposer=proposers.DRAFT,
        )
        drafts = self._propose(self._plan(number, at, init))
        while at + self._depth + 1 < len(tokens):
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == tokens[at + accepted]:
                accepted += 1
            own = tokens[at + accepted]
            plan = self._plan(number, 2)
            calls = iter((False, False))
            self._draft.draft_ahead(plan, lambda calls=calls: next(calls, True))  # type: ignore[misc]
            assert self._draft._ahead is not None
            is_hit = self._draft._ahead.has_branch(0, RowOutcome(accepted, own))
            self.rounds += counts
            self.hits += counts and is_hit
            new = (*drafts[:accepted], own)
            row = RowVerdict(0, number, at, len(drafts), len(drafts), accepted, new)
            self._draft.observe(Verdict(1, self._step - 1, (row,)))
            at += len(new)
            drafts = self._propose(plan)

    def _plan(self, generation: int, count: int, init: RowInit | None = None) -> StepPlan:
        self._step += 1
        depth = self._depth
        blocks = () if init is None else tuple(range(_BLOCKS))
        row = RowPlan(
            *(0, generation, 1, depth, depth, True, proposers.DRAFT, 0, (), 0, blocks, count)
        )
        admitted = () if init is None else (init,)
        released = (0,) if init is not None and self._step > 1 else ()
        branches = self._num_branches
        return StepPlan(1, self._step, (row,), admitted, released, num_branches=branches)

    def _propose(self, plan: StepPlan) -> list[int]:
        self._draft.follow(plan)
        return list(self._draft.propose(plan)[0].tokens)


def main(
    depth: Annotated[int, typer.Option(help="Draft tokens a round.")] = 5,
    branches: Annotated[str, typer.Option(help="Numbers of branches, with commas.")] = "8,24",
    prompts: Annotated[int, typer.Option(help="How many Spec-Bench prompts.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens a text.")] = 128,
) -> None:
    """Measure how often outcomes are among the branches."""
    for temperature in _TEMPERATURES:
        texts = written(temperature, prompts, tokens)
        for count in map(int, branches.split(",")):
            replay = Replay(temperature, depth, count)
            for number, text in enumerate(texts):
                replay.run(number, text, counts=number >= _UNCOUNTED)
            share = replay.hits / max(replay.rounds, 1)
            print(f"T {temperature}, {count} branches: {share:.3f} of {replay.rounds} rounds")


if __name__ == "__main__":
    typer.run(main)
