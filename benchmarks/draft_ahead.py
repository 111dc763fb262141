"""Drafting ahead of outcomes beside drafting after them, target and draft on a core each.

    python -m outrider.benchmarks.draft_ahead [--target-ms 11.5 --draft-ms 0.88] [--json FILE]

Engines whose ranks are child processes with one thread each write the same texts in turns. Times
are those of whole texts from the first token on, compared text by text. With `--target-ms` and
`--draft-ms` passes take these times, `--scale` times as long: what models of these times, on
devices of their own, would gain at batch size 1.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from outrider.benchmarks.paced_rank import Pace, set_pace
from outrider.benchmarks.prompts import encode_question, read_questions, select_questions
from outrider.engine.launch.ranks import SpawnedRanks
from outrider.engine.llm import LLM
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.policies import AHEAD_AUTO, AHEAD_OFF, AHEAD_ON
from outrider.scheduler.types import AheadCounts
from outrider.workers.proposers.draft_ahead import DraftAhead

TARGET, DRAFT = "smollm2-135m-instruct", "smollm2-135m-draft"
MODES = (AHEAD_OFF, AHEAD_ON, AHEAD_AUTO)


class Case(NamedTuple):
    """What is measured, and the times that passes are given, if any."""

    depth: int
    temperature: float
    num_prompts: int
    num_tokens: int
    rounds: int
    pace: Pace | None = None
    slowed_down: float = 1.0


class _Measured:
    """Of one mode."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.seconds: list[float] = []
        self.texts: list[list[int]] = []
        self.num_steps = 0
        self.before = AheadCounts()

    def decode(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        seconds, text, steps = _decode(self.llm, request_id, prompt, params)
        self.seconds.append(seconds)
        self.texts.append(text)
        self.num_steps += steps

    def start(self) -> None:
        """Forget the warm-up."""
        self.seconds, self.texts, self.num_steps = [], [], 0
        self.before = self.llm.engine.built.status().counters.ahead

    def counts(self) -> AheadCounts:
        after = self.llm.engine.built.status().counters.ahead
        return AheadCounts(*map(operator.sub, after, self.before))


def measure(case: Case) -> dict[str, Any]:
    modes = {mode: _Measured(_engine(case, mode)) for mode in MODES}
    tokenizer = modes[AHEAD_OFF].llm.get_tokenizer()
    questions = select_questions(read_questions(), per_group=4)[: case.num_prompts]
    for turn in range(case.rounds + 1):
        if turn == 1:  # the first turn warms up, and teaches which outcomes are likely
            for each in modes.values():
                each.start()
        for number, question in enumerate(questions):
            prompt = encode_question(question, tokenizer)
            params = SamplingParams(
                temperature=case.temperature,
                max_tokens=case.num_tokens,
                ignore_eos=True,
                seed=number,
            )
            for each in modes.values():
                each.decode(f"{turn}/{number}", prompt, params)
    row = _row(case, modes)
    for each in modes.values():
        each.llm.close()
    return row


def _engine(case: Case, mode: str) -> LLM:
    return LLM(
        TARGET,
        draft_model=DRAFT,
        speculation_policy="fixed",
        num_speculative_tokens=case.depth,
        workers="processes",
        num_threads=1,
        draft_ahead=mode,
        seed=1,
    )


def _row(case: Case, modes: dict[str, _Measured]) -> dict[str, Any]:
    off, on, auto = (modes[mode] for mode in MODES)
    best = min(off, on, key=lambda each: sum(each.seconds))
    ahead = on.counts()
    pace = case.pace
    sequential_s = sum(off.seconds) / off.num_steps / case.slowed_down
    return {
        "depth": case.depth,
        "temperature": case.temperature,
        "target_ms": pace and round(1e3 * pace.target / case.slowed_down, 3),
        "draft_ms": pace and round(1e3 * pace.draft / case.slowed_down, 3),
        "slowed_down": case.slowed_down,
        "branches": pace.max_branches if pace else DraftAhead.max_branches,
        "texts": len(on.texts),
        "tokens": case.num_tokens,
        "sequential_ms_per_step": round(1e3 * sequential_s, 2),
        "speedup_ahead": _speedup(off, on),
        "speedup_auto_over_better": _speedup(best, auto),
        "hit_rate": round(ahead.hits / max(ahead.rounds, 1), 3),
        "used_share": round(ahead.used / max(ahead.drafted, 1), 3),
        "same_text": off.texts == on.texts == auto.texts,
    }


def _decode(
    llm: LLM, request_id: str, prompt: list[int], params: SamplingParams
) -> tuple[float, list[int], int]:
    """Seconds and steps from the first token on, and the text."""
    output = llm.engine.add(request_id, prompt, params)
    while not output.outputs[0].token_ids:
        llm.engine.step()
    start_s, steps = time.perf_counter(), 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    return time.perf_counter() - start_s, list(output.outputs[0].token_ids), steps


def _speedup(base: _Measured, own: _Measured) -> float:
    """The median over texts."""
    pairs = zip(base.seconds, own.seconds, strict=True)
    return round(statistics.median(base_s / own_s for base_s, own_s in pairs), 3)


def main(
    depths: Annotated[str, typer.Option(help="Depths to measure, with commas.")] = "2,4",
    temperatures: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,0.7,1",
    prompts: Annotated[int, typer.Option(help="How many Spec-Bench prompts.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens a text.")] = 96,
    rounds: Annotated[int, typer.Option(help="Measured turns through the prompts.")] = 3,
    target_ms: Annotated[float, typer.Option(help="Let its pass take so long.")] = 0.0,
    draft_ms: Annotated[float, typer.Option(help="Let its pass take so long.")] = 0.0,
    scale: Annotated[float, typer.Option(help="Slow both down by this.")] = 8.0,
    branches: Annotated[int, typer.Option(help="Of a draft whose pass takes a set time.")] = 24,
    json_file: Annotated[Path | None, typer.Option("--json", help="Add rows to this file.")] = None,
) -> None:
    """Measure what drafting ahead gains."""
    pace = None
    if target_ms:
        pace = Pace(scale * target_ms / 1e3, scale * draft_ms / 1e3, branches)
        set_pace(pace)
        SpawnedRanks.command = (sys.executable, "-m", "outrider.benchmarks.paced_rank")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    rows = []
    for depth in map(int, depths.split(",")):
        for temperature in map(float, temperatures.split(",")):
            sizes = (prompts, tokens, rounds, pace, scale if pace else 1.0)
            rows.append({"machine": machine} | measure(Case(depth, temperature, *sizes)))
            print(json.dumps(rows[-1]), flush=True)
    if json_file is not None:
        kept = json.loads(json_file.read_text()) if json_file.exists() else {}
        kept.setdefault("draft_ahead", []).extend(rows)
        json_file.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
