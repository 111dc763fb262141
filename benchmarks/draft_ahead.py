"""Drafting ahead of outcomes beside drafting behind them, target and draft on a core each.

    python -m outrider.benchmarks.draft_ahead [--target-ms 11.5 --draft-ms 0.88] [--json FILE]

Engines whose ranks are child processes with one thread each write the same texts in turns. Times
are those of whole texts from the first token on, as ratios text by text. With `--target-ms` and
`--draft-ms` passes take these times, `--scale` times as long: what larger models would gain.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.benchmarks.paced_rank import Pace, set_pace
from outrider.benchmarks.prompts import encode_question, read_questions, select_questions
from outrider.engine.launch.ranks import SpawnedRanks
from outrider.engine.llm import LLM
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.policies import AHEAD_AUTO, AHEAD_OFF, AHEAD_ON
from outrider.scheduler.types import AheadCounts

TARGET, DRAFT = "smollm2-135m-instruct", "smollm2-135m-draft"
MODES = (AHEAD_OFF, AHEAD_ON, AHEAD_AUTO)


def measure(
    depth: int, temperature: float, num_prompts: int, num_tokens: int, rounds: int
) -> dict[str, Any]:
    engines = {
        mode: LLM(
            TARGET,
            draft_model=DRAFT,
            speculation_policy="fixed",
            num_speculative_tokens=depth,
            workers="processes",
            num_threads=1,
            draft_ahead=mode,
            seed=1,
        )
        for mode in MODES
    }
    tokenizer = engines[AHEAD_OFF].get_tokenizer()
    questions = select_questions(read_questions(), per_group=4)[:num_prompts]
    prompts = [encode_question(question, tokenizer) for question in questions]
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    texts: dict[str, list[list[int]]] = {mode: [] for mode in MODES}
    num_steps = 0
    for turn in range(rounds + 1):
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=number
            )
            for mode, llm in engines.items():
                seconds, text, steps = _decode(llm, f"{turn}/{number}", prompt, params)
                if turn:  # the first turn warms up, and teaches which outcomes are likely
                    times[mode].append(seconds)
                    texts[mode].append(text)
                    num_steps += steps if mode == AHEAD_OFF else 0
    counts = {mode: _counts(llm) for mode, llm in engines.items()}
    for llm in engines.values():
        llm.close()
    ahead = counts[AHEAD_ON]
    best = min(AHEAD_OFF, AHEAD_ON, key=lambda mode: sum(times[mode]))
    return {
        "depth": depth,
        "temperature": temperature,
        "ms_per_step": round(1e3 * sum(times[AHEAD_OFF]) / num_steps, 2),
        "ms_per_token": {
            mode: round(1e3 * sum(times[mode]) / sum(map(len, texts[mode])), 2) for mode in MODES
        },
        "ahead_over_sequential": _ratio(times[AHEAD_OFF], times[AHEAD_ON]),
        "auto_over_best": _ratio(times[best], times[AHEAD_AUTO]),
        "hit_rate": round(ahead.hits / ahead.rounds, 3) if ahead.rounds else None,
        "used_tokens": round(ahead.used / ahead.drafted, 3) if ahead.drafted else None,
        "same_text": all(texts[mode] == texts[AHEAD_OFF] for mode in MODES),
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


def _counts(llm: LLM) -> AheadCounts:
    return llm.engine.built.status().counters.ahead


def _ratio(base_s: list[float], own_s: list[float]) -> float:
    """Of speeds: the median over texts."""
    pairs = zip(base_s, own_s, strict=True)
    return round(statistics.median(base / own for base, own in pairs), 3)


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
    is_paced = target_ms > 0
    if is_paced:
        set_pace(Pace(scale * target_ms / 1e3, scale * draft_ms / 1e3, branches))
        SpawnedRanks.command = (sys.executable, "-m", "outrider.benchmarks.paced_rank")
    rows = []
    for depth in depths.split(","):
        for temperature in temperatures.split(","):
            row = measure(int(depth), float(temperature), prompts, tokens, rounds)
            if is_paced:
                row |= {"target_ms": target_ms, "draft_ms": draft_ms, "slowed_down": scale}
            rows.append(row)
            print(json.dumps(rows[-1]), flush=True)
    if json_file is not None:
        kept = json.loads(json_file.read_text()) if json_file.exists() else {}
        kept.setdefault("draft_ahead", {"command": "python -m outrider.benchmarks.draft_ahead"})
        kept["draft_ahead"]["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
        kept["draft_ahead"].setdefault("rows", []).extend(rows)
        json_file.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
