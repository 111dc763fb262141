"""Many streams at once inside a program of your own, without a server.

python examples/streams.py
"""

import asyncio

from outrider import AsyncEngine, EngineConfig, SamplingParams

PROMPTS = {
    "sea": "Write one sentence about the sea.",
    "sky": "Write one sentence about the sky.",
    "sum": "One, two, three,",
}


async def stream(engine: AsyncEngine, name: str, prompt: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    async for delta in engine.generate(name, prompt, params):
        print(f"{name}: {delta.text!r} ({sum(delta.is_drafted)} of {len(delta.token_ids)} drafted)")


async def main() -> None:
    # The same as AsyncEngine(deterministic=True, max_num_seqs=8): options are those of LLM.
    config = EngineConfig.from_kwargs(deterministic=True, max_num_seqs=8)
    engine = AsyncEngine(config=config)
    try:
        await asyncio.gather(*(stream(engine, *each) for each in PROMPTS.items()))
    finally:
        engine.close()


if __name__ == "__main__":
    asyncio.run(main())
