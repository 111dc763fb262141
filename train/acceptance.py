"""What a student is worth: tokens a round through the engine, by category and prompt length."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.scheduler.params import SamplingParams
from outrider.text.outputs import RequestOutput
from outrider.train.data import open_llm
from outrider.train.settings import SHARE_OF_GPU, EvaluationSettings
from outrider.train.shards import Record
from outrider.train.telling import Teller


@dataclass(slots=True)
class Tally:
    """Of some texts."""

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, output: RequestOutput) -> None:
        done = output.outputs[0]
        self.prompts += 1
        self.tokens += len(done.speculation.drafted_by_token)
        self.rounds += done.speculation.rounds
        self.drafted += done.speculation.drafted
        self.accepted += done.speculation.accepted

    def as_json(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "tokens_a_round": round(self.tokens / max(self.rounds, 1), 4),
            "acceptance": round(self.accepted / max(self.drafted, 1), 4),
        }


def measure_acceptance(
    target: str,
    checkpoint: Path,
    is_model: bool,
    records: Sequence[Record],
    kinds: Sequence[str],
    settings: EvaluationSettings,
    context: int,
    device: str,
    teller: Teller,
    share_of_gpu: float = SHARE_OF_GPU,
) -> dict[str, Any]:
    """Greedy and sampled, over the prompts of records: in all, by category, by prompt length."""
    role = "draft_model" if is_model else "head_model"
    options: dict[str, Any] = {role: str(checkpoint)}
    with teller.at_work(f"loading {target} with {checkpoint}"):
        llm = open_llm(target, context, device, share_of_gpu, **options)
    try:
        cut = [evaluated(number, record, settings.tokens) for number, record in enumerate(records)]
        fitting = [record for record in cut if 0 < record.begin <= context - settings.tokens]
        found: dict[str, Any] = {"depth": settings.depth, "tokens": settings.tokens}
        for name, temperature in (("greedy", 0.0), ("sampled", settings.temperature)):
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=settings.tokens,
                    seed=number,
                    num_speculative_tokens=settings.depth,
                    fix_depth=True,
                )
                for number in range(len(fitting))
            ]
            prompts: list[Any] = [
                {"prompt_token_ids": [int(token) for token in record.ids[: record.begin]]}
                for record in fitting
            ]
            with teller.at_work(f"measuring acceptance, {name}"):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            found[name] = _tables(outputs, fitting, kinds, settings)
        return found
    finally:
        llm.close()


def evaluated(number: int, record: Record, num_tokens: int) -> Record:
    """The record with `begin` where it is to be gone on with: of every second one as late as so
    many tokens allow, for a conversation is a long prompt by its end."""
    if number % 2 == 0:
        return record
    return dataclasses.replace(record, begin=max(record.begin, len(record.ids) - num_tokens))


def _tables(
    outputs: Sequence[RequestOutput],
    records: Sequence[Record],
    kinds: Sequence[str],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    overall = Tally()
    by_kind: dict[str, Tally] = defaultdict(Tally)
    by_length: dict[str, Tally] = defaultdict(Tally)
    for output, record in zip(outputs, records, strict=True):
        for tally in (overall, by_kind[kinds[record.kind]], by_length[_group(record, settings)]):
            tally.add(output)
    return {
        "all": overall.as_json(),
        "by_category": {name: by_kind[name].as_json() for name in sorted(by_kind)},
        "by_prompt_length": {
            name: by_length[name].as_json() for name in sorted(by_length, key=_upper_end)
        },
    }


def _group(record: Record, settings: EvaluationSettings) -> str:
    ends = [end for end in settings.lengths if record.begin <= end]
    return f"up to {min(ends)}" if ends else f"above {max(settings.lengths)}"


def _upper_end(name: str) -> float:
    return float("inf") if name.startswith("above") else int(name.rpartition(" ")[2])
