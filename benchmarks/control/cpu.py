"""The matrix with the bundled pair on this CPU."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.benchmarks.control.bursts import measure_bursts
from outrider.benchmarks.control.engine import (
    Blocks,
    ClosedLoop,
    LiveCell,
    ensure_costs,
    measure_live,
    request_maker,
)
from outrider.benchmarks.control.simulation import DEEPEST
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.config import EngineConfig
from outrider.engine.build import build_engine

_SEATS = 16
_MEASURING_S = 1.5  # per load and depth


def measure_cpu(
    loads: Sequence[int],
    texts: Sequence[str],
    blocks: Blocks,
    num_tokens: int,
    *,
    bursts: bool = False,
) -> list[LiveCell]:
    config = EngineConfig.from_kwargs(
        model=BUNDLED_TARGET,
        draft_model=BUNDLED_DRAFT,
        device="cpu",
        max_num_seqs=_SEATS,
        num_speculative_tokens=DEEPEST,
        enable_prefix_caching=False,
    )
    built = build_engine(config)
    try:
        loop, vocab = built.loop, built.facts.vocab_size
        make = request_maker(texts[0], vocab, num_tokens)
        ensure_costs(loop, make, max(loads), _MEASURING_S)
        cells = []
        for number, (text, clients) in enumerate((t, c) for t in texts for c in loads):
            make = request_maker(text, vocab, num_tokens)
            if bursts:
                name = f"{clients} at once, {text}"
                cells.append(measure_bursts(loop, name, clients, make, blocks.rounds))
                continue
            closed = ClosedLoop(loop, clients, make, first=10**7 * (number + 1))
            cells.append(measure_live(f"{clients} clients, {text}", closed, blocks))
            closed.end()
        return cells
    finally:
        built.close()
