"""Outrider itself, in a peer's process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

import outrider
from outrider.benchmarks.peers.protocol import Generation, Mode, Options, Tokens


class OutriderEngine:
    """One engine for all modes: a request names its own proposer and depth."""

    def __init__(self, options: Options) -> None:
        self._llm = outrider.LLM(
            model=options.target,
            draft_model=options.draft,
            dtype=options.dtype,
            device="cpu",
            max_model_len=options.max_model_len,
            enable_prefix_caching=False,
            num_threads=options.threads,
        )

    @property
    def versions(self) -> dict[str, str]:
        return {"outrider": outrider.__version__, "torch": torch.__version__}

    @property
    def settings(self) -> dict[str, str]:
        return {}

    def generate(self, prompts: Sequence[Tokens], max_tokens: int, mode: Mode) -> Generation:
        params = outrider.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            speculation=mode.method,
            num_speculative_tokens=mode.depth,
            fix_depth=mode.depth is not None,
        )
        start = time.perf_counter()
        results = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        seconds = time.perf_counter() - start
        outputs = [result.outputs[0] for result in results]
        return Generation(
            token_ids=[list(output.token_ids) for output in outputs],
            seconds=seconds,
            rounds=sum(output.speculation.rounds for output in outputs),
            drafted=sum(output.speculation.drafted for output in outputs),
            accepted=sum(output.speculation.accepted for output in outputs),
        )
