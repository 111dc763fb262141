"""The prefix cache hit rate if API keys share the cache, and if each has its own.

    python -m outrider.benchmarks.prefix_sharing --keys 16 --system-tokens 512

Real conversations are distributed over the keys, each turn sent with all earlier turns and a shared
system prompt. The real scheduler and its block pool serve them one at a time, without a model.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.benchmarks.scheduler import BLOCK_SIZE, ScriptedTarget
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.request import Request
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import IN_PROCESS, RequestSpec, SampleId
from outrider.text.tokenizer import load_tokenizer

TURNS = Path(__file__).resolve().parent / "data" / "oasst_multiturn" / "oasst1_en.jsonl.gz"
TOKENIZER = "smollm2-135m-draft"
_BUDGET = 2048


def conversations() -> list[list[list[int]]]:
    """The prompts of each conversation as token ids, in turn order."""
    tokenizer = load_tokenizer(TOKENIZER)
    found: defaultdict[str, list[list[int]]] = defaultdict(list)
    with gzip.open(TURNS, "rt", encoding="utf-8") as file:
        for line in file:
            texts = [message["content"] for message in json.loads(line)["messages"]]
            ids = tokenizer.encode("\n".join(texts), add_special_tokens=False)
            found[texts[0]].append(list(ids))
    return [sorted(turns, key=len) for turns in found.values()]


def requests(num_keys: int, system_tokens: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """Keys and prompts, conversations interleaved at random."""
    rng = random.Random(seed)
    system = [rng.randrange(1000, 40_000) for _ in range(system_tokens)]
    waiting = [(rng.randrange(num_keys), turns) for turns in conversations()]
    order = [index for index, (_, turns) in enumerate(waiting) for _ in turns]
    rng.shuffle(order)
    return [(waiting[index][0], system + waiting[index][1].pop(0)) for index in order]


def hit_rate(
    prompts_by_key: list[tuple[int, list[int]]], kv_tokens: int, *, is_shared: bool
) -> float:
    """The cached share of prompt tokens."""
    pool = BlockPool(kv_tokens // BLOCK_SIZE, BLOCK_SIZE)
    scheduler, target = Scheduler(SchedulerLimits(1, _BUDGET), pool), ScriptedTarget()
    for index, (key, prompt) in enumerate(prompts_by_key):
        salt = "" if is_shared else f"key {key}"
        params = SamplingParams(max_tokens=1)
        spec = RequestSpec(tuple(prompt), params, 0, len(prompt) + 1, cache_salt=salt)
        scheduler.add(Request(SampleId(IN_PROCESS, index), spec, seed=0, arrival_s=0.0))
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.apply(target.verdict(plan))
        scheduler.take_updates()
    return scheduler.num_cached_tokens / scheduler.num_prompt_tokens


def main(
    keys: Annotated[int, typer.Option(help="Keys that share the conversations.")] = 16,
    system_tokens: Annotated[int, typer.Option(help="Tokens of the shared system prompt.")] = 512,
    kv_tokens: Annotated[int, typer.Option(help="Capacity of the block pool.")] = 200_000,
) -> None:
    """Print both hit rates."""
    prompts_by_key = requests(keys, system_tokens)
    for name, is_shared in (("all", True), ("group", False)):
        rate = hit_rate(prompts_by_key, kv_tokens, is_shared=is_shared)
        typer.echo(
            f"prefix_sharing: {name:5}  {rate:.1%} of {len(prompts_by_key)} prompts' tokens cached"
        )


if __name__ == "__main__":
    typer.run(main)
