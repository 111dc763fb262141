"""Models enlarged to real shapes on a GPU: what a token, a drafting round and a verification take.

The target has the shape of Llama-3.1-8B, drafts that of a 110M model unless they are larger in
something, heads the shape that heads of an 8B model have; all compute what the small ones compute.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.gpu_engine import BenchEngine, Decoding, Models, Proposing
from outrider.bench.proposers.book import Book
from outrider.bench.proposers.contenders import Contender, Kind, Variant
from outrider.bench.proposers.prompts import LENGTHS, Ask
from outrider.bench.proposers.small import WARM_UP_TOKENS, about_asks, num_same
from outrider.workers.proposers.base import DRAFT, NGRAM

SHORT, LONG = "enlarged_short", "enlarged_long"

Texts = list[list[int]]


class EnlargedRun:
    """An engine for each variant, one after the other: a GPU's speed hardly drifts."""

    def __init__(
        self,
        models: Models,
        book: Book,
        *,
        draft_shape: str | None,
        tokens: int,
        temperatures: Mapping[str, float],
    ) -> None:
        self._models = models
        self._book = book
        self._draft_shape = draft_shape
        self._tokens = tokens
        self._temperatures = temperatures
        self._plain: dict[tuple[str, str], Texts] = {}
        self.failed: list[str] = []

    def measure(self, variants: Sequence[Variant], lists: Mapping[str, Sequence[Ask]]) -> None:
        """Every variant over each list of prompts, which are by part."""
        for part, asks in lists.items():
            self._book.begin(part, **about_asks(asks))
        for variant in variants:
            try:
                self._measure(variant, lists)
            except Exception as error:
                # Time on the machine is scarce: one proposer must not cost the figures of others.
                traceback.print_exc()
                self.failed.append(f"{variant.name} was not measured: {error}")

    def _measure(self, variant: Variant, lists: Mapping[str, Sequence[Ask]]) -> None:
        proposing = self._proposing(variant.contender)
        engine = BenchEngine(self._models, depth=variant.depth, proposing=proposing)
        self._book.say(f"{variant.name}: models are loaded, passes recorded")
        try:
            for part, asks in lists.items():
                prompts = [list(ask.ids) for ask in asks]
                engine.decode(prompts[:1], WARM_UP_TOKENS)
                record = variant.key
                for name, temperature in self._temperatures.items():
                    found = self._decode(engine, prompts, temperature, (part, name))
                    record[name] = found
                    self._book.say(f"{part}, {variant.name}, {name}: {_told(found)}")
                self._book.note(part, record)
        finally:
            engine.close()

    def _proposing(self, contender: Contender) -> Proposing:
        if contender.kind is Kind.DRAFT:
            assert contender.source is not None
            return Proposing(DRAFT, self._models.draft(self._draft_shape, contender.source))
        if contender.kind is Kind.HEAD:
            assert contender.source is not None
            head = self._models.head(contender.source)
            return Proposing(head.spec.kind.value, None, head)
        return Proposing(NGRAM) if contender.kind is Kind.NGRAM else Proposing()

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


def by_length(asks: Sequence[Ask]) -> dict[str, list[Ask]]:
    """Short and long prompts apart, as far as there are any; longer ones are left out."""
    short = [ask for ask in asks if len(ask.ids) <= LENGTHS[0]]
    long = [ask for ask in asks if LENGTHS[0] < len(ask.ids) <= LENGTHS[1]]
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


def _told(found: Mapping[str, Any]) -> str:
    return (
        f"{found['ms_per_token']:.3f} ms a token, {found['tokens_a_round']:.3f} tokens a round, "
        f"draft {found['draft_ms']:.3f} ms, verify {found['verify_ms']:.3f} ms, "
        f"{found['same_texts']} of {found['texts']} texts equal"
    )
