"""Models enlarged to real shapes on a GPU: the time of a token, a draft round and a verification.

The target has the shape of Llama-3.1-8B, drafts that of a 110M model or larger, heads that of an 8B
model's heads; all compute what the small ones compute.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.benchmarks.gpu_engine import BenchEngine, Decoding, EnlargedModels, Proposing
from outrider.benchmarks.proposers.contenders import Contender, ProposerKind, ProposerVariant
from outrider.benchmarks.proposers.prompts import LENGTHS, BenchPrompt
from outrider.benchmarks.proposers.results_file import ResultsFile
from outrider.benchmarks.proposers.small import WARM_UP_TOKENS, num_same, prompt_facts
from outrider.catalog.proposers import DRAFT, NGRAM

SHORT, LONG = "enlarged_short", "enlarged_long"

Texts = list[list[int]]


class EnlargedRun:
    """An engine for each variant, sequentially: a GPU's speed hardly drifts."""

    def __init__(
        self,
        models: EnlargedModels,
        results: ResultsFile,
        *,
        draft_shape: str | None,
        tokens: int,
        temperatures: Mapping[str, float],
    ) -> None:
        self._models = models
        self._results = results
        self._draft_shape = draft_shape
        self._tokens = tokens
        self._temperatures = temperatures
        self._plain: dict[tuple[str, str], Texts] = {}
        self.failed: list[str] = []

    def measure(
        self, variants: Sequence[ProposerVariant], lists: Mapping[str, Sequence[BenchPrompt]]
    ) -> None:
        """Measure every variant on each part's prompts."""
        for part, bench_prompts in lists.items():
            self._results.begin_part(part, **prompt_facts(bench_prompts))
        for variant in variants:
            try:
                self._measure(variant, lists)
            except Exception as error:
                # GPU time is scarce: one failing proposer must not cost the others' results.
                traceback.print_exc()
                self.failed.append(f"{variant.name} was not measured: {error}")

    def _measure(
        self, variant: ProposerVariant, lists: Mapping[str, Sequence[BenchPrompt]]
    ) -> None:
        proposing = self._proposing(variant.contender)
        engine = BenchEngine(self._models, depth=variant.depth, proposing=proposing)
        self._results.log(f"{variant.name}: models loaded, CUDA graphs captured")
        try:
            for part, bench_prompts in lists.items():
                prompts = [list(prompt.ids) for prompt in bench_prompts]
                engine.decode(prompts[:1], WARM_UP_TOKENS)
                record = variant.key
                for name, temperature in self._temperatures.items():
                    found = self._decode(engine, prompts, temperature, (part, name))
                    record[name] = found
                    self._results.log(f"{part}, {variant.name}, {name}: {_summary(found)}")
                self._results.add_record(part, record)
        finally:
            engine.close()

    def _proposing(self, contender: Contender) -> Proposing:
        if contender.kind is ProposerKind.DRAFT:
            assert contender.source is not None
            return Proposing(DRAFT, self._models.draft(self._draft_shape, contender.source))
        if contender.kind is ProposerKind.HEAD:
            assert contender.source is not None
            head = self._models.head(contender.source)
            return Proposing(head.spec.kind.value, None, head)
        return Proposing(NGRAM) if contender.kind is ProposerKind.NGRAM else Proposing()

    def _decode(
        self, engine: BenchEngine, prompts: Texts, temperature: float, key: tuple[str, str]
    ) -> dict[str, Any]:
        stats = engine.loop.scheduler.stats
        drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
        found, texts = engine.decode(prompts, self._tokens, temperature)
        expected = self._plain.setdefault(key, texts)
        return {
            **_figures(found),
            "acceptance": round(
                (stats.accepted_tokens - accepted) / max(stats.drafted_tokens - drafted, 1), 4
            ),
            "same_texts": num_same(texts, expected),
            "texts": len(texts),
        }


def by_length(bench_prompts: Sequence[BenchPrompt]) -> dict[str, list[BenchPrompt]]:
    """Short and long prompts by part; prompts beyond both lengths are dropped."""
    short = [prompt for prompt in bench_prompts if len(prompt.ids) <= LENGTHS[0]]
    long = [prompt for prompt in bench_prompts if LENGTHS[0] < len(prompt.ids) <= LENGTHS[1]]
    return {part: own for part, own in ((SHORT, short), (LONG, long)) if own}


def _figures(found: Decoding) -> dict[str, Any]:
    return {
        "ms_per_token": round(found.ms_per_token, 4),
        "tokens_a_round": round(found.tokens_per_round, 4),
        "round_ms": round(found.ms_per_round, 4),
        "draft_ms": round(found.draft_ms_per_round, 4),
        "verify_ms": round(found.verify_ms_per_round, 4),
        "host_ms": round(found.host_ms_per_round, 4),
        "tokens": found.tokens,
    }


def _summary(found: Mapping[str, Any]) -> str:
    return (
        f"{found['ms_per_token']:.3f} ms a token, {found['tokens_a_round']:.3f} tokens a round, "
        f"draft {found['draft_ms']:.3f} ms, verify {found['verify_ms']:.3f} ms, "
        f"{found['same_texts']} of {found['texts']} texts equal"
    )
