"""A student's acceptance: tokens per round in the engine, by category and prompt length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.acceptance_tables import params_at_depth, tables
from outrider.train.data import open_llm
from outrider.train.progress import ProgressReporter
from outrider.train.settings import SHARE_OF_GPU, EvaluationSettings
from outrider.train.shards import TrainingRecord


def measure_acceptance(
    target: str,
    checkpoint: Path,
    is_model: bool,
    records: Sequence[TrainingRecord],
    kinds: Sequence[str],
    settings: EvaluationSettings,
    context: int,
    device: str,
    reporter: ProgressReporter,
    share_of_gpu: float = SHARE_OF_GPU,
) -> dict[str, Any]:
    """Greedy and sampled, over the prompts of `records`: in all, by category, by prompt length."""
    role = "draft_model" if is_model else "head_model"
    options: dict[str, Any] = {role: str(checkpoint)}
    with reporter.task(f"loading {target} with {checkpoint}"):
        llm = open_llm(target, context, device, share_of_gpu, **options)
    try:
        cut = [
            evaluation_record(number, record, settings.tokens)
            for number, record in enumerate(records)
        ]
        fitting = [record for record in cut if 0 < record.begin <= context - settings.tokens]
        found: dict[str, Any] = {"depth": settings.depth, "tokens": settings.tokens}
        for name, temperature in (("greedy", 0.0), ("sampled", settings.temperature)):
            params = params_at_depth(len(fitting), settings.depth, settings.tokens, temperature)
            prompts: list[Any] = [
                {"prompt_token_ids": [int(token) for token in record.ids[: record.begin]]}
                for record in fitting
            ]
            with reporter.task(f"measuring acceptance, {name}"):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            found[name] = tables(
                outputs,
                [kinds[record.kind] for record in fitting],
                [record.begin for record in fitting],
                settings.lengths,
            )
        return found
    finally:
        llm.close()


def evaluation_record(number: int, record: TrainingRecord, num_tokens: int) -> TrainingRecord:
    """The record to continue from `begin`. Every second one begins as late as `num_tokens` allow:
    the end of a conversation has a long prompt."""
    if number % 2 == 0:
        return record
    return dataclasses.replace(record, begin=max(record.begin, len(record.ids) - num_tokens))
