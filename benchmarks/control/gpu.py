"""The matrix on one GPU: a target of 8B shape and a draft of 110M, arms switched on one engine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from outrider.benchmarks.control.bursts import measure_cell
from outrider.benchmarks.control.engine import (
    Blocks,
    ClosedLoop,
    MakeRequest,
    ensure_costs,
    line,
    request_maker,
    switch,
)
from outrider.benchmarks.control.gpu_steady import measure_steady
from outrider.benchmarks.control.gpu_users import measure_users
from outrider.benchmarks.control.simulation import AUTO, DEEPEST
from outrider.benchmarks.gpu_engine import BenchEngine, EnlargedModels
from outrider.catalog.proposers import NGRAM
from outrider.checkpoints.resolve import BUNDLED_TARGET
from outrider.errors import ConfigError
from outrider.scheduler.request import Request
from outrider.scheduler.types import IN_PROCESS, RequestSpec, SampleId

_DRAFT_SHAPE = "110m"
_NUM_TOKENS = 192
_NEIGHBOURS = 64
_LONG_CONTEXT = 4096
_MEASURING_S = 0.15  # per load and depth, where the engine has not timed its passes
_RARE = ("logprobs", "ngram", "bad_words", "4k context")
_PARTS = ("steady", "bursts", "matrix", "neighbours", "users")


def measure_gpu(
    parts: Sequence[str],
    loads: Sequence[int],
    texts: Sequence[str],
    blocks: Blocks,
    limit_s: float,
    found: dict[str, Any],
    *,
    deterministic: bool = False,
) -> None:
    """Write results into `found` at once: the machine may go away before the end."""
    for part in parts:
        if part not in _PARTS:
            raise ConfigError(f"part is {part!r}; it must be one of {', '.join(_PARTS)}.")
    end_s = time.monotonic() + limit_s
    models = EnlargedModels(BUNDLED_TARGET, deterministic=deterministic)
    vocab = models.target().spec.vocab_size
    if "steady" in parts:
        make = request_maker(texts[0], vocab, _NUM_TOKENS)
        measure_steady(models, _DRAFT_SHAPE, make, found)
    if "bursts" in parts or "matrix" in parts:
        engine = BenchEngine(models, _DRAFT_SHAPE, DEEPEST, max(loads))
        make = request_maker(texts[0], vocab, _NUM_TOKENS)
        ensure_costs(engine.loop, make, max(loads), _MEASURING_S)
        for part in ("bursts", "matrix"):
            if part in parts:
                _measure_loads(part, engine, loads, texts, vocab, blocks, end_s, found)
        engine.close()
    if "neighbours" in parts and time.monotonic() < end_s:
        engine = BenchEngine(
            models, _DRAFT_SHAPE, DEEPEST, _NEIGHBOURS, max_len=_LONG_CONTEXT + 512
        )
        make = request_maker(texts[0], vocab, _NUM_TOKENS)
        ensure_costs(engine.loop, make, _NEIGHBOURS, _MEASURING_S)
        kept = found.setdefault("neighbours", {})
        for number, rare in enumerate(_RARE):
            if time.monotonic() < end_s:
                kept[rare] = _share_kept(engine, make, rare, number, blocks)
        engine.close()
    if "users" in parts and time.monotonic() < end_s:
        make = request_maker(texts[0], vocab, _NUM_TOKENS)
        measure_users(models, _DRAFT_SHAPE, make, found.setdefault("users", {}))


def _measure_loads(
    part: str,
    engine: BenchEngine,
    loads: Sequence[int],
    texts: Sequence[str],
    vocab: int,
    blocks: Blocks,
    end_s: float,
    found: dict[str, Any],
) -> None:
    cells = found["cells" if part == "matrix" else part] = []
    for text, clients in itertools.product(texts, loads):
        if time.monotonic() >= end_s:
            return
        make = request_maker(text, vocab, _NUM_TOKENS)
        is_burst = part == "bursts"
        cell = measure_cell(engine.loop, clients, text, make, blocks, is_burst=is_burst)
        cells.append(asdict(cell))
        print(line(cell), flush=True)


def _share_kept(
    engine: BenchEngine, make: MakeRequest, rare: str, number: int, blocks: Blocks
) -> float:
    """The share of their speed that the others keep beside one request with a rare option."""
    loop = engine.loop
    switch(loop, AUTO)
    closed = ClosedLoop(loop, _NEIGHBOURS, make, first=10**8 * (number + 1))
    closed.run(blocks.block_s)
    alone, beside = [], []
    for block in range(blocks.rounds):
        closed.run(blocks.settling_s)
        tokens, _, spent_s = closed.run(blocks.block_s)
        alone.append(tokens / spent_s / _NEIGHBOURS)
        guest = _rare_request(make(10**9 + 100 * number + block), rare)
        closed.guest = guest.sample_id
        loop.scheduler.add(guest)
        closed.run(blocks.settling_s)
        tokens, _, spent_s = closed.run(blocks.block_s)
        beside.append(tokens / spent_s / (_NEIGHBOURS - 1))
        loop.scheduler.cancel(guest.sample_id)
    closed.end()
    return statistics.fmean(beside) / statistics.fmean(alone)


def _rare_request(usual: Request, rare: str) -> Request:
    spec = usual.spec
    params, prompt = spec.params, spec.prompt_ids
    changed: RequestSpec = replace(spec, params=replace(params, max_tokens=_LONG_CONTEXT))
    if rare == "logprobs":
        changed = replace(changed, params=replace(changed.params, logprobs=5))
    elif rare == "ngram":
        changed = replace(changed, proposer=NGRAM)
    elif rare == "bad_words":
        changed = replace(changed, bad_word_ids=((prompt[0], prompt[1]),))
    elif rare == "4k context":
        repeated = (prompt * (_LONG_CONTEXT // len(prompt) + 1))[:_LONG_CONTEXT]
        changed = replace(changed, prompt_ids=repeated)
    changed = replace(changed, max_len=min(len(changed.prompt_ids) + 2048, _LONG_CONTEXT + 500))
    sample_id = SampleId(IN_PROCESS, usual.sample_id.handle)
    return Request(sample_id, changed, seed=usual.seed, arrival_s=time.monotonic())
