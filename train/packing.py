"""Packs conversations into rows of one length; the order follows from seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.train.shards import TrainingRecord

_OPEN_ROWS = 32  # best fit: a document goes into the fullest of them that has room


@dataclass(frozen=True, slots=True)
class Documents:
    """Document boundaries of a packed batch; a row's padding counts as one more document.

    `cu_seqlens` int32 [documents + 1] are cumulative lengths, row after row. `document_ids` and
    `positions` [rows, length] are each token's document and its position in it.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    document_ids: Tensor
    positions: Tensor

    def mask(self, window: int = 0) -> Tensor:
        """The causal mask within documents: bool [rows, 1, length, length]."""
        document_ids, positions = self.document_ids, self.positions
        mask = document_ids[:, :, None] == document_ids[:, None, :]
        distance = positions[:, :, None] - positions[:, None, :]
        mask &= distance >= 0
        if window:
            mask &= distance < window
        return mask[:, None]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`loss_indices` int64 [n] are the flat indices whose next token is a label, with their
    `loss_weights` [n] and their positions in their documents, `loss_positions` [n].

    A training batch also has the `record_ids` it was packed from, and as `token_indices`
    [rows, length] each token's index in the data set; padding has the index behind the last."""

    ids: Tensor  # int64 [rows, length]
    documents: Documents
    loss_indices: Tensor
    loss_weights: Tensor
    loss_positions: Tensor
    record_ids: tuple[int, ...] = ()
    token_indices: Tensor | None = None

    def to(self, device: torch.device) -> PackedBatch:
        if device.type == "cpu":
            return self

        def move(value: Tensor) -> Tensor:
            return value.pin_memory().to(device, non_blocking=True)

        documents = replace(
            self.documents,
            cu_seqlens=move(self.documents.cu_seqlens),
            document_ids=move(self.documents.document_ids),
            positions=move(self.documents.positions),
        )
        return PackedBatch(
            move(self.ids),
            documents,
            move(self.loss_indices),
            move(self.loss_weights),
            move(self.loss_positions),
            self.record_ids,
            None if self.token_indices is None else move(self.token_indices),
        )


class TeacherStates(NamedTuple):
    """The teacher's hidden states for a batch, row after row: the LM head's input [tokens, width],
    and the inputs of the tapped layers [tokens, layers * width]."""

    hidden: Tensor
    features: Tensor | None


def pack_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Indices of documents, by row: best fit over `_OPEN_ROWS` open rows."""
    done: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # (room, documents)
    for number, length in enumerate(lengths):
        size = min(length, row_length)
        fitting = [index for index, (room, _) in enumerate(open_rows) if room >= size]
        if fitting:
            index = min(fitting, key=lambda each: open_rows[each][0])
            room, row = open_rows.pop(index)
        else:
            room, row = row_length, []
        row.append(number)
        open_rows.append((room - size, row))
        if len(open_rows) > _OPEN_ROWS:
            fullest = min(range(len(open_rows)), key=lambda each: open_rows[each][0])
            done.append(open_rows.pop(fullest)[1])
    return done + [row for _, row in open_rows]


@dataclass(slots=True)
class PackedDataLoader:
    """An endless loader; its whole state is `epoch` and `index`.

    An epoch has each record once, except those of an incomplete last batch.
    """

    records: Sequence[TrainingRecord]
    row_length: int
    num_rows: int
    prompt_weight: float
    seed: int
    epoch: int = 0
    index: int = 0
    _planned: tuple[int, list[list[int]]] | None = None
    _offsets: npt.NDArray[np.int64] = field(init=False)  # of records, and the end

    def __post_init__(self) -> None:
        lengths = [min(len(record.ids), self.row_length) for record in self.records]
        self._offsets = np.cumsum([0, *lengths], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> PackedBatch:
        rows = self._rows()
        first = self.index * self.num_rows
        if first and first + self.num_rows > len(rows):
            self.epoch, self.index, first = self.epoch + 1, 0, 0
            rows = self._rows()
        self.index += 1
        chosen = rows[first : first + self.num_rows]
        picked = [[self.records[i] for i in row] for row in chosen]
        batch = make_batch(picked, self.row_length, self.prompt_weight)
        record_ids = tuple(record_id for row in chosen for record_id in row)
        token_indices = torch.from_numpy(self._token_indices(chosen))
        return replace(batch, record_ids=record_ids, token_indices=token_indices)

    def _token_indices(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
        indices = np.full((len(rows), self.row_length), self.num_tokens, np.int64)
        for row_indices, record_ids in zip(indices, rows, strict=True):
            at = 0
            for record_id in record_ids:
                begin, end = self._offsets[record_id], self._offsets[record_id + 1]
                row_indices[at : at + end - begin] = np.arange(begin, end)
                at += end - begin
        return indices

    def _rows(self) -> list[list[int]]:
        if self._planned is None or self._planned[0] != self.epoch:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.records))
            packed = pack_rows([len(self.records[i].ids) for i in order], self.row_length)
            self._planned = self.epoch, [[int(order[i]) for i in row] for row in packed]
        return self._planned[1]


def make_batch(
    rows: Sequence[Sequence[TrainingRecord]], length: int, prompt_weight: float
) -> PackedBatch:
    """Rows of records, each truncated to the row's length."""
    shape = (len(rows), length)
    ids, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    document_ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    sizes: list[int] = []
    for row, records in enumerate(rows):
        at = 0
        for record in records:
            size = min(len(record.ids), length)
            part = slice(at, at + size)
            ids[row, part] = record.ids[:size]
            weights[row, part] = prompt_weight
            weights[row, at + min(record.begin, size) : at + size] = 1.0
            weights[row, at] = 0.0  # the first token is not a label
            document_ids[row, part], positions[row, part] = len(sizes), np.arange(size)
            sizes.append(size)
            at += size
        if at < length:
            document_ids[row, at:], positions[row, at:] = len(sizes), np.arange(length - at)
            sizes.append(length - at)
    loss_weights = np.zeros(shape, np.float32)
    loss_weights[:, :-1] = weights[:, 1:]
    return _batch(ids, loss_weights, document_ids, positions, sizes)


def _batch(
    ids: npt.NDArray[Any],
    loss_weights: npt.NDArray[Any],
    document_ids: npt.NDArray[Any],
    positions: npt.NDArray[Any],
    sizes: list[int],
) -> PackedBatch:
    flat = loss_weights.reshape(-1)
    loss_indices = np.flatnonzero(flat)
    cu_seqlens = np.cumsum([0, *sizes], dtype=np.int32)
    documents = Documents(
        torch.from_numpy(cu_seqlens),
        max(sizes, default=0),
        torch.from_numpy(document_ids),
        torch.from_numpy(positions),
    )
    return PackedBatch(
        torch.from_numpy(ids),
        documents,
        torch.from_numpy(loss_indices),
        torch.from_numpy(flat[loss_indices]),
        torch.from_numpy(positions.reshape(-1)[loss_indices]),
    )
