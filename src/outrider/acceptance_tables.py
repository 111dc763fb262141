"""Tokens per round at a fixed depth: in all, by category, by prompt length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.scheduler.params import SamplingParams
from outrider.text.outputs import RequestOutput


@dataclass(slots=True)
class AcceptanceTally:
    """Sums over some requests."""

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


def params_at_depth(
    count: int, depth: int, tokens: int, temperature: float, *, ignore_eos: bool = False
) -> list[SamplingParams]:
    """For `count` requests with different seeds that draft `depth` tokens in every round; a depth
    of 0 leaves it to the engine."""
    return [
        SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            seed=number,
            ignore_eos=ignore_eos,
            num_speculative_tokens=depth or None,
            fix_depth=depth > 0,
        )
        for number in range(count)
    ]


def tables(
    outputs: Sequence[RequestOutput],
    categories: Sequence[str],
    lengths: Sequence[int],
    ends: Sequence[int],
) -> dict[str, Any]:
    """Acceptance of `outputs` by their prompts' categories and lengths; `ends` bound the groups."""
    overall = AcceptanceTally()
    by_category: dict[str, AcceptanceTally] = defaultdict(AcceptanceTally)
    by_length: dict[str, AcceptanceTally] = defaultdict(AcceptanceTally)
    for output, category, length in zip(outputs, categories, lengths, strict=True):
        for tally in (overall, by_category[category], by_length[length_group(length, ends)]):
            tally.add(output)
    return {
        "all": overall.as_json(),
        "by_category": {name: by_category[name].as_json() for name in sorted(by_category)},
        "by_prompt_length": {
            name: by_length[name].as_json() for name in sorted(by_length, key=upper_end)
        },
    }


def length_group(length: int, ends: Sequence[int]) -> str:
    upper = [end for end in ends if length <= end]
    return f"up to {min(upper)}" if upper else f"above {max(ends)}"


def upper_end(group: str) -> float:
    """The sort key of a length group."""
    return float("inf") if group.startswith("above") else int(group.rpartition(" ")[2])
