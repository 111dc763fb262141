"""What the parts of a step take on this device, found out by running each of them on nothing.

The plan is empty then: every token is padding, which costs a pass what any token does, but is
stored nowhere and has no context to read. What reading takes is told from how fast memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from outrider.scheduler.costs import CostTable, StepCosts
from outrider.workers.gpu.drafting import DraftRounds
from outrider.workers.gpu.heading import HeadPasses
from outrider.workers.gpu.passes import TargetPasses
from outrider.workers.gpu.readback import mark, seconds_between
from outrider.workers.models.kv import bytes_per_block
from outrider.workers.recorded.recording import RecordedPasses
from outrider.workers.runner import Runner

_REPEATS = 3
_PREFILL_TOKENS = 512
_READ_BYTES = 2**30  # much more than a cache holds, if there is as much
# Without a GPU nobody waits for these figures, and kernels are interpreted: a few are enough.
_HOST_SIZES, _HOST_REPEATS, _HOST_PREFILL_TOKENS = 2, 1, 4
_FREE = CostTable((1,), (0.0,), is_padded=True)


def measure_costs(
    passes: TargetPasses,
    target: Runner,
    rounds: DraftRounds | None,
    catching_up: RecordedPasses | None,
    heading: HeadPasses | None = None,
) -> StepCosts:
    """Of passes over an empty plan, recorded where they can be. A second or two on a GPU. What goes
    over every pass of the target is part of its cost."""
    meter = _Meter(target.device)
    first = next_ = _FREE
    if rounds is not None:
        first, next_ = _draft_costs(meter, rounds)
    most = passes.head.largest

    def verify(size: int) -> None:
        passes.run(size, size, min(size, most))
        if heading is not None:
            heading.extend(size, min(size, most))

    sizes = meter.few(passes.body.sizes)
    seconds = tuple(meter.seconds(verify, size) for size in sizes)
    return StepCosts(
        verify=CostTable(tuple(sizes), seconds, is_padded=True),
        first_draft=first,
        next_draft=next_,
        context_s=_context_s(meter, target),
        tile_tokens=passes.tile_tokens,
        prefill_s=0.0 if catching_up is None else _prefill_s(meter, catching_up),
    )


class _Meter:
    """Times what is enqueued on a device, gaps between launches included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_gpu = device.type == "cuda"
        self._repeats = _REPEATS if self.is_gpu else _HOST_REPEATS

    def seconds(self, run: Callable[..., object], *args: Any) -> float:
        if self.is_gpu:
            run(*args)  # the first may have something to load
        marks = [mark(self._device)]
        for _ in range(self._repeats):
            run(*args)
            marks.append(mark(self._device))
        marks[-1].synchronize()
        return median(seconds_between(*pair) for pair in pairwise(marks))

    def few(self, sizes: Sequence[int]) -> list[int]:
        return list(sizes) if self.is_gpu else list(sizes[:_HOST_SIZES])


def _draft_costs(meter: _Meter, rounds: DraftRounds) -> tuple[CostTable, CostTable]:
    """Of few rows, whose rounds are recorded whole, a later pass is what it adds to a round."""
    depth = len(rounds.whole)
    few = meter.few(rounds.whole[0].sizes)
    first = [meter.seconds(rounds.whole[0].run, size) for size in few]
    whole = [meter.seconds(rounds.whole[-1].run, size) for size in few]
    next_ = [
        max(all_ - one, all_ / 2) / (depth - 1) if depth > 1 else one  # never next to nothing
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
    """To read the KV of one token."""
    keys = runner.kv.keys[0].flatten()
    keys = keys[: _READ_BYTES // keys.element_size()]
    per_byte = meter.seconds(keys.sum) / keys.nbytes
    spec = runner.decoder.spec
    block_size = runner.kv.block_size
    return bytes_per_block(spec, block_size, keys.dtype) / block_size * per_byte


def _prefill_s(meter: _Meter, catching_up: RecordedPasses) -> float:
    """A token of a prompt, in a pass of many."""
    most = _PREFILL_TOKENS if meter.is_gpu else _HOST_PREFILL_TOKENS
    size = catching_up.size_for(min(most, catching_up.largest))
    return meter.seconds(catching_up.run, size) / size
