"""What is done with every batch, recorded on a GPU and played again.

Launching the many small kernels of a pass or of a training step takes longer than they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outrider.train.packing import Batch, Documents, Seen

logger = logging.getLogger(__name__)

_LEAST_DOCUMENTS = 16
_ROWS_APART = 2048  # between the numbers of rows that recordings have room for
_TIMES_BEFORE = 2  # a shape is run as it is: by then memory and kernels of its like are there

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Recording(Generic[Result]):
    batch: Batch
    seen: Seen | None
    graph: torch.cuda.CUDAGraph
    result: Result


class Recorded(Generic[Result]):
    """`run`, recorded for each shape that comes again. What a call returns is overwritten by the
    next. One that does not read the rows of a batch finds none in it."""

    def __init__(
        self, run: Callable[[Batch, Seen | None], Result], what: str, *, reads_rows: bool
    ) -> None:
        self._run, self._what = run, what
        self._reads_rows = reads_rows
        self._met: dict[tuple[int, ...], int] = {}
        self._made: dict[tuple[int, ...], _Recording[Result]] = {}
        self._memory: Any = None  # which all recordings share, as they run one at a time
        self._may_record = True

    def __call__(self, batch: Batch, seen: Seen | None = None) -> Result:
        num_rows = _room_for_rows(len(batch.rows)) if self._reads_rows else 0
        key = (*batch.ids.shape, _room_for_documents(batch.documents), num_rows)
        times = self._met[key] = self._met.get(key, 0) + 1
        if key not in self._made and self._may_record and times > _TIMES_BEFORE:
            self._record(key, batch, seen)
        made = self._made.get(key)
        if made is None:
            return self._run(batch, seen)
        _fill(made.batch, batch)
        if made.seen is not None and seen is not None:
            _copy(made.seen, seen)
        made.graph.replay()
        return made.result

    def _record(self, key: tuple[int, ...], batch: Batch, seen: Seen | None) -> None:
        """Recording runs nothing."""
        held = _held(batch, key[-1])
        _fill(held, batch)
        own = None if seen is None else _held_seen(seen)
        graph = torch.cuda.CUDAGraph()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._memory):
                result = self._run(held, own)
        except RuntimeError as error:
            logger.warning("%s cannot be recorded (%s); it runs as it is.", self._what, error)
            self._may_record = False
            return
        self._made[key] = _Recording(held, own, graph, result)


def _room_for_documents(documents: Documents) -> int:
    """Few sizes, so that there are few recordings."""
    count = max(len(documents.bounds) - 1, _LEAST_DOCUMENTS)
    return 1 << (count - 1).bit_length()


def _room_for_rows(count: int) -> int:
    return -(-count // _ROWS_APART) * _ROWS_APART


def _held(batch: Batch, num_rows: int) -> Batch:
    """Tensors with room for every batch of its shape."""
    given = batch.documents
    documents = Documents(
        given.bounds.new_empty(_room_for_documents(given) + 1),
        batch.ids.shape[1],  # the longest there may be
        torch.empty_like(given.numbers),
        torch.empty_like(given.positions),
    )
    return Batch(
        torch.empty_like(batch.ids),
        documents,
        batch.rows.new_zeros(num_rows),
        batch.weights.new_zeros(num_rows),
        batch.inside.new_zeros(num_rows),
    )


def _held_seen(seen: Seen) -> Seen:
    features = None if seen.features is None else seen.features.clone()
    return Seen(seen.hidden.clone(), features)


def _fill(held: Batch, given: Batch) -> None:
    """Beyond the documents given are some of no token, and beyond its rows some of no weight."""
    held.ids.copy_(given.ids)
    _begin(held.documents.bounds, given.documents.bounds)
    rest = held.documents.bounds[len(given.documents.bounds) :]
    rest.copy_(given.documents.bounds[-1:].expand(len(rest)))
    held.documents.numbers.copy_(given.documents.numbers)
    held.documents.positions.copy_(given.documents.positions)
    if not len(held.rows):
        return
    for own, other in (
        (held.rows, given.rows),
        (held.weights, given.weights),
        (held.inside, given.inside),
    ):
        _begin(own, other)
        own[len(other) :].zero_()


def _begin(held: Tensor, given: Tensor) -> None:
    held[: len(given)].copy_(given)


def _copy(held: Seen, given: Seen) -> None:
    held.hidden.copy_(given.hidden)
    if held.features is not None and given.features is not None:
        held.features.copy_(given.features)
