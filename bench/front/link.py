"""`python -m outrider.bench.front.link`: a closed loop straight at an engine's link.

What is left when no gateway stands between, for an engine that listens at an address known here,
with its secret in OUTRIDER_SECRET. Prompts are those of Spec-Bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field

from outrider.bench.prompts import encode_question, read_questions
from outrider.gateway.engine_link import EngineAddress, EngineLink, EngineLost, Event
from outrider.links.gateway_messages import EngineFacts, Submit, SubmittedSample
from outrider.links.secret import secret_from_environment
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import RequestSpec, RequestUpdate
from outrider.text.front_door import FrontDoor
from outrider.text.tokenizer import load_tokenizer

CONNECT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Count:
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)


def specs_of(facts: EngineFacts, most_prompt: int, num_tokens: int) -> list[RequestSpec]:
    tokenizer = load_tokenizer(str(facts.settings["target.model"]))
    front_door = FrontDoor(facts, tokenizer)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [encode_question(question, tokenizer) for question in read_questions()]
    return [
        front_door.prepare("bench", prompt, params).spec
        for prompt in prompts
        if len(prompt) <= most_prompt
    ]


async def _client(link: EngineLink, specs: list[RequestSpec], count: _Count) -> None:
    chance = random.Random(link.new_handle())
    while True:
        done, began_s = asyncio.Event(), time.monotonic()
        is_first = True

        def take(event: Event, done: asyncio.Event = done, began_s: float = began_s) -> None:
            nonlocal is_first
            if isinstance(event, EngineLost):  # or this run is over
                return
            if not isinstance(event, RequestUpdate):
                raise SystemExit(f"the engine says {event}")
            count.tokens += len(event.token_ids)
            if is_first and event.token_ids:
                is_first = False
                count.first_s.append(time.monotonic() - began_s)
            if event.finish_reason is not None:
                link.forget(event.sample_id.handle)
                done.set()

        sample = SubmittedSample(link.new_handle(), 0)
        link.submit(Submit(chance.choice(specs), (sample,), None, False), take)
        await done.wait()


async def _run(given: argparse.Namespace) -> None:
    async def locate() -> EngineAddress:
        return EngineAddress(given.engine, secret_from_environment())

    async def met(facts: EngineFacts) -> None: ...

    async def changed() -> None: ...

    link = EngineLink(locate, met, changed)
    keeping = asyncio.create_task(link.run())
    await link.wait_connected(CONNECT_TIMEOUT_S)
    assert link.facts is not None
    specs = await asyncio.to_thread(specs_of, link.facts, given.max_prompt_tokens, given.tokens)
    count = _Count()
    clients = [asyncio.create_task(_client(link, specs, count)) for _ in range(given.clients)]
    await asyncio.sleep(given.warm_up)
    for _ in range(given.blocks):
        before, began_s = count.tokens, time.monotonic()
        count.first_s.clear()
        await asyncio.sleep(given.seconds)
        rate = (count.tokens - before) / (time.monotonic() - began_s)
        first_ms = statistics.median(count.first_s) * 1000
        told = {"tokens_per_s": round(rate, 1), "first_p50_ms": round(first_ms, 1)}
        print(json.dumps({"clients": given.clients} | told), flush=True)
    for task in (*clients, keeping):
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.front.link")
    parser.add_argument("--engine", required=True, help="unix:/path or tcp:host:port")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a block")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--warm-up", type=float, default=4.0)
    given = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asyncio.run(_run(given))


if __name__ == "__main__":
    main()
