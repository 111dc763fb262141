"""CUDA graphs of the teacher's pass and of the training step.

Launching their many small kernels takes longer than running them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outrider.train.packing import Documents, PackedBatch, TeacherStates

logger = logging.getLogger(__name__)

_MIN_DOCUMENTS = 16
_ROW_BUCKET = 2048  # captures are padded to multiples of it
_EAGER_RUNS = 2  # of a shape before its capture: they warm up allocator and kernels

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Capture(Generic[Result]):
    batch: PackedBatch
    teacher_states: TeacherStates | None
    graph: torch.cuda.CUDAGraph
    result: Result


class CapturedStep(Generic[Result]):
    """`run` with a CUDA graph for each recurring shape. The next call overwrites the result.
    Without `reads_loss_rows` a captured batch has no loss rows."""

    def __init__(
        self,
        run: Callable[[PackedBatch, TeacherStates | None], Result],
        what: str,
        *,
        reads_loss_rows: bool,
    ) -> None:
        self._run, self._what = run, what
        self._reads_loss_rows = reads_loss_rows
        self._seen_counts: dict[tuple[int, ...], int] = {}
        self._captures: dict[tuple[int, ...], _Capture[Result]] = {}
        self._memory: Any = None  # one pool for all graphs: they run one at a time
        self._can_capture = True

    def __call__(self, batch: PackedBatch, teacher_states: TeacherStates | None = None) -> Result:
        num_rows = _row_bucket(len(batch.loss_indices)) if self._reads_loss_rows else 0
        key = (*batch.ids.shape, _document_bucket(batch.documents), num_rows)
        times = self._seen_counts[key] = self._seen_counts.get(key, 0) + 1
        if key not in self._captures and self._can_capture and times > _EAGER_RUNS:
            self._capture(key, batch, teacher_states)
        capture = self._captures.get(key)
        if capture is None:
            return self._run(batch, teacher_states)
        _fill(capture.batch, batch)
        if capture.teacher_states is not None and teacher_states is not None:
            _copy_states(capture.teacher_states, teacher_states)
        capture.graph.replay()
        return capture.result

    def _capture(
        self, key: tuple[int, ...], batch: PackedBatch, teacher_states: TeacherStates | None
    ) -> None:
        """Capture only; nothing runs."""
        static = _static_batch(batch, key[-1])
        _fill(static, batch)
        static_states = None if teacher_states is None else _static_states(teacher_states)
        graph = torch.cuda.CUDAGraph()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._memory):
                result = self._run(static, static_states)
        except RuntimeError as error:
            logger.warning(
                "%s cannot be captured in a CUDA graph (%s); it runs eagerly.", self._what, error
            )
            self._can_capture = False
            return
        self._captures[key] = _Capture(static, static_states, graph, result)


def _document_bucket(documents: Documents) -> int:
    """Powers of two, so that there are few captures."""
    count = max(len(documents.cu_seqlens) - 1, _MIN_DOCUMENTS)
    return 1 << (count - 1).bit_length()


def _row_bucket(count: int) -> int:
    return -(-count // _ROW_BUCKET) * _ROW_BUCKET


def _static_batch(batch: PackedBatch, num_rows: int) -> PackedBatch:
    """Static input buffers for every batch of this shape."""
    given = batch.documents
    documents = Documents(
        given.cu_seqlens.new_empty(_document_bucket(given) + 1),
        batch.ids.shape[1],  # the upper bound
        torch.empty_like(given.document_ids),
        torch.empty_like(given.positions),
    )
    return PackedBatch(
        torch.empty_like(batch.ids),
        documents,
        batch.loss_indices.new_zeros(num_rows),
        batch.loss_weights.new_zeros(num_rows),
        batch.loss_positions.new_zeros(num_rows),
    )


def _static_states(teacher_states: TeacherStates) -> TeacherStates:
    features = None if teacher_states.features is None else teacher_states.features.clone()
    return TeacherStates(teacher_states.hidden.clone(), features)


def _fill(static: PackedBatch, given: PackedBatch) -> None:
    """Pad with empty documents, and with loss rows of weight 0."""
    static.ids.copy_(given.ids)
    _copy_prefix(static.documents.cu_seqlens, given.documents.cu_seqlens)
    rest = static.documents.cu_seqlens[len(given.documents.cu_seqlens) :]
    rest.copy_(given.documents.cu_seqlens[-1:].expand(len(rest)))
    static.documents.document_ids.copy_(given.documents.document_ids)
    static.documents.positions.copy_(given.documents.positions)
    if not len(static.loss_indices):
        return
    for buffer, values in (
        (static.loss_indices, given.loss_indices),
        (static.loss_weights, given.loss_weights),
        (static.loss_positions, given.loss_positions),
    ):
        _copy_prefix(buffer, values)
        buffer[len(values) :].zero_()


def _copy_prefix(static: Tensor, given: Tensor) -> None:
    static[: len(given)].copy_(given)


def _copy_states(static: TeacherStates, given: TeacherStates) -> None:
    static.hidden.copy_(given.hidden)
    if static.features is not None and given.features is not None:
        static.features.copy_(given.features)
