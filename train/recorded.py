"""A pass recorded on a GPU and played again.

Launching its many small kernels takes longer than they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.train.packing import Documents

logger = logging.getLogger(__name__)

_LEAST_DOCUMENTS = 16


class Seen(NamedTuple):
    """Of every token, row after row: what the head reads [tokens, width], and what enters the
    layers asked for [tokens, layers * width]."""

    hidden: Tensor
    features: Tensor | None


See = Callable[[Tensor, Documents], Seen]


@dataclass(frozen=True, slots=True)
class _Recording:
    ids: Tensor
    documents: Documents
    graph: torch.cuda.CUDAGraph
    seen: Seen


class RecordedPasses:
    """`see`, recorded for each shape that comes a second time. What a call returns is overwritten
    by the next."""

    def __init__(self, see: See) -> None:
        self._see = see
        self._met: set[tuple[int, ...]] = set()
        self._made: dict[tuple[int, ...], _Recording] = {}
        self._may_record = True

    def __call__(self, ids: Tensor, documents: Documents) -> Seen:
        key = (*ids.shape, _capacity(documents))
        if key not in self._made and (key not in self._met or not self._may_record):
            self._met.add(key)
            return self._see(ids, documents)
        if key not in self._made:
            recording = self._record(ids, documents)
            if recording is None:
                return self._see(ids, documents)
            self._made[key] = recording
        made = self._made[key]
        made.ids.copy_(ids)
        _fill(made.documents, documents)
        made.graph.replay()
        return made.seen

    def _record(self, ids: Tensor, documents: Documents) -> _Recording | None:
        held_ids = ids.clone()
        held = Documents(
            documents.bounds.new_empty(_capacity(documents) + 1),
            ids.shape[1],  # the longest there may be
            documents.numbers.clone(),
            documents.positions.clone(),
        )
        _fill(held, documents)
        graph = torch.cuda.CUDAGraph()
        try:
            self._see(held_ids, held)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                seen = self._see(held_ids, held)
        except RuntimeError as error:
            logger.warning("the teacher's pass cannot be recorded (%s); it runs as it is.", error)
            self._may_record = False
            return None
        return _Recording(held_ids, held, graph, seen)


def _capacity(documents: Documents) -> int:
    """Documents a recording holds: few sizes, so that there are few recordings."""
    count = max(len(documents.bounds) - 1, _LEAST_DOCUMENTS)
    return 1 << (count - 1).bit_length()


def _fill(held: Documents, given: Documents) -> None:
    """What is beyond the documents given are some of no token."""
    count = len(given.bounds)
    held.bounds[:count].copy_(given.bounds)
    held.bounds[count:].copy_(given.bounds[-1:].expand(len(held.bounds) - count))
    held.numbers.copy_(given.numbers)
    held.positions.copy_(given.positions)
