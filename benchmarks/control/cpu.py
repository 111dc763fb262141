"""The matrix with the bundled pair on this CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from outrider.benchmarks.control.bursts import measure_cell
from outrider.benchmarks.control.engine import (
    Blocks,
    LiveCell,
    ensure_costs,
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
        for text, clients in itertools.product(texts, loads):
            make = request_maker(text, vocab, num_tokens)
            cells.append(measure_cell(loop, clients, text, make, blocks, is_burst=bursts))
        return cells
    finally:
        built.close()
