"""Measures the cost of the parts of a step on this device, by running each on an empty plan.

Every token is then padding, which costs a pass as much as any token but is stored nowhere and has
no context to read. The cost of reading a context follows from the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from outrider.scheduler.costs import CostTable, StepCosts
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses
from outrider.workers.gpu.drafting import DraftRounds
from outrider.workers.gpu.passes import TargetPasses
from outrider.workers.gpu.proposing import DeviceProposer
from outrider.workers.gpu.readback import record_event, seconds_between
from outrider.workers.models.kv import bytes_per_block
from outrider.workers.runner import Runner

_REPEATS = 3
_PREFILL_TOKENS = 512
_READ_BYTES = 2**30  # much more than the GPU's caches hold
# Without a GPU kernels are interpreted and the figures do not matter: a few are enough.
_HOST_SIZES, _HOST_REPEATS, _HOST_PREFILL_TOKENS = 2, 1, 4
_FREE = CostTable((1,), (0.0,), is_padded=True)


def measure_costs(
    passes: TargetPasses,
    target: Runner,
    proposers: Collection[DeviceProposer],
) -> StepCosts:
    """Costs of passes over an empty plan, captured if possible. Takes a second or two on a GPU.
    Drafting costs what the first proposer with rounds needs."""
    meter = _Meter(target.device)
    rounds = next((each.rounds for each in proposers if each.rounds is not None), None)
    passes_over_text = (each.catch_up_pass for each in proposers)
    catch_up = next((each for each in passes_over_text if each is not None), None)
    first = next_ = _FREE
    if rounds is not None:
        first, next_ = _draft_costs(meter, rounds)
    max_logits = passes.head.largest

    def verify(size: int) -> None:
        passes.run(size, size, min(size, max_logits))
        for each in proposers:
            each.extend(size, min(size, max_logits))

    sizes = meter.few(passes.body.sizes)
    seconds = tuple(meter.seconds(verify, size) for size in sizes)
    return StepCosts(
        verify=CostTable(tuple(sizes), seconds, is_padded=True),
        first_draft=first,
        next_draft=next_,
        context_s=_context_s(meter, target),
        tile_tokens=passes.tile_tokens,
        prefill_s=0.0 if catch_up is None else _prefill_s(meter, catch_up),
    )


def measure_drafting_costs(draft: Runner, passes: DeviceProposer) -> StepCosts:
    """As `measure_costs`, of a draft model without its target."""
    meter = _Meter(draft.device)
    assert passes.rounds is not None and passes.catch_up_pass is not None
    first, next_ = _draft_costs(meter, passes.rounds)
    return StepCosts(_FREE, first, next_, prefill_s=_prefill_s(meter, passes.catch_up_pass))


class _Meter:
    """Times work enqueued on a device, gaps between launches included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_gpu = device.type == "cuda"
        self._repeats = _REPEATS if self.is_gpu else _HOST_REPEATS

    def seconds(self, run: Callable[..., object], *args: Any) -> float:
        if self.is_gpu:
            run(*args)  # warm-up
        events = [record_event(self._device)]
        for _ in range(self._repeats):
            run(*args)
            events.append(record_event(self._device))
        events[-1].synchronize()
        return median(seconds_between(*pair) for pair in pairwise(events))

    def few(self, sizes: Sequence[int]) -> list[int]:
        return list(sizes) if self.is_gpu else list(sizes[:_HOST_SIZES])


def _draft_costs(meter: _Meter, rounds: DraftRounds) -> tuple[CostTable, CostTable]:
    """With few rows, rounds are captured whole: a later pass costs what it adds to a round."""
    if not rounds.whole:  # the bound on depth is 0
        return _FREE, _FREE
    depth = len(rounds.whole)
    few = meter.few(rounds.whole[0].sizes)
    first = [meter.seconds(rounds.whole[0].run, size) for size in few]
    whole = [meter.seconds(rounds.whole[-1].run, size) for size in few]
    next_ = [
        max(all_ - one, all_ / 2) / (depth - 1) if depth > 1 else one  # never close to zero
        for one, all_ in zip(first, whole, strict=True)
    ]
    many = meter.few(rounds.first.sizes)
    first += [meter.seconds(rounds.first.run, size) for size in many]
    later = rounds.later[0] if rounds.later else rounds.first
    next_ += [meter.seconds(later.run, size) for size in many]
    sizes = (*few, *many)
    return (
        CostTable(sizes, tuple(first), is_padded=True),
        CostTable(sizes, tuple(next_), is_padded=True),
    )


def _context_s(meter: _Meter, runner: Runner) -> float:
    """Seconds to read the KV of one token."""
    keys = runner.kv.keys[0].flatten()
    keys = keys[: _READ_BYTES // keys.element_size()]
    per_byte = meter.seconds(keys.sum) / keys.nbytes
    spec = runner.decoder.spec
    block_size = runner.kv.block_size
    return bytes_per_block(spec, block_size, keys.dtype) / block_size * per_byte


def _prefill_s(meter: _Meter, catch_up: CapturedPasses) -> float:
    """Seconds per prompt token, in a large pass."""
    num_tokens = _PREFILL_TOKENS if meter.is_gpu else _HOST_PREFILL_TOKENS
    size = catch_up.size_for(min(num_tokens, catch_up.largest))
    return meter.seconds(catch_up.run, size) / size
