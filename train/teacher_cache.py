"""Caches the teacher's states on the device, so that each record is computed once, not per epoch.

A token's states depend on its own document only, wherever it is packed. A few kilobytes a token
fit beside a student on a GPU for tens of millions of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.train.packing import PackedBatch, TeacherStates

SHARE_OF_FREE = 0.7  # of the device's memory when training begins


class TeacherCache:
    """`compute` with a cache over the data set, for batches that have `token_indices`."""

    def __init__(
        self, compute: Callable[[PackedBatch], TeacherStates], num_records: int, num_tokens: int
    ) -> None:
        self._compute = compute
        self._num_tokens = num_tokens
        self._cached = [False] * num_records
        self._hidden: Tensor | None = None
        self._features: Tensor | None = None
        self._has_room = True

    def __call__(self, batch: PackedBatch) -> TeacherStates:
        if batch.token_indices is None or not self._has_room:
            return self._compute(batch)
        indices = batch.token_indices.flatten()
        if self._hidden is not None and all(self._cached[number] for number in batch.record_ids):
            features = None if self._features is None else self._features[indices]
            return TeacherStates(self._hidden[indices], features)
        teacher_states = self._compute(batch)
        self._store(batch, indices, teacher_states)
        return teacher_states

    def _store(self, batch: PackedBatch, indices: Tensor, teacher_states: TeacherStates) -> None:
        if self._hidden is None and not self._make_room(teacher_states):
            return
        assert self._hidden is not None
        self._hidden[indices] = teacher_states.hidden
        if self._features is not None and teacher_states.features is not None:
            self._features[indices] = teacher_states.features
        for number in batch.record_ids:
            self._cached[number] = True

    def _make_room(self, teacher_states: TeacherStates) -> bool:
        """Allocate; one entry more than there are tokens takes the padding."""
        parts = [part for part in teacher_states if part is not None]
        token_bytes = sum(part.shape[1] * part.element_size() for part in parts)
        free = _free_bytes(teacher_states.hidden.device)
        self._has_room = (self._num_tokens + 1) * token_bytes <= free * SHARE_OF_FREE
        if not self._has_room:
            return False
        buffers = [part.new_zeros(self._num_tokens + 1, part.shape[1]) for part in parts]
        self._hidden = buffers[0]
        self._features = buffers[1] if len(buffers) > 1 else None
        return True


def _free_bytes(device: torch.device) -> int:
    """None on a CPU: a resumed run is bit-exact there, which states of another packing are not."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
