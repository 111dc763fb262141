"""Conversations packed into rows of one length, in an order that follows from seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.train.shards import Record

_OPEN_ROWS = 32  # of which the fullest that fits takes a document


@dataclass(frozen=True, slots=True)
class Documents:
    """Where the documents of a packed batch begin and end. What is left of a row is one more.

    `bounds` int32 [documents + 1] counts tokens row after row; `numbers` [rows, length] tells
    whose a token is, and `positions` [rows, length] where in it.
    """

    bounds: Tensor
    longest: int
    numbers: Tensor
    positions: Tensor

    def mask(self, window: int = 0) -> Tensor:
        """bool [rows, 1, length, length]: whom each token sees, itself and those before it."""
        numbers, positions = self.numbers, self.positions
        sees = numbers[:, :, None] == numbers[:, None, :]
        behind = positions[:, :, None] - positions[:, None, :]
        sees &= behind >= 0
        if window:
            sees &= behind < window
        return sees[:, None]


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` int64 [n] are the places, counted row after row, whose next token is learned, each
    with its weight [n]; `inside` is how many tokens of its document stand before each.

    A batch of a training knows the numbers of its `records`, and by `places` [rows, length] where
    each token stands among those of all records, what is left of rows standing behind them."""

    ids: Tensor  # int64 [rows, length]
    documents: Documents
    rows: Tensor
    weights: Tensor
    inside: Tensor
    records: tuple[int, ...] = ()
    places: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self

        def move(value: Tensor) -> Tensor:
            return value.pin_memory().to(device, non_blocking=True)

        documents = replace(
            self.documents,
            bounds=move(self.documents.bounds),
            numbers=move(self.documents.numbers),
            positions=move(self.documents.positions),
        )
        return Batch(
            move(self.ids),
            documents,
            move(self.rows),
            move(self.weights),
            move(self.inside),
            self.records,
            None if self.places is None else move(self.places),
        )


class Seen(NamedTuple):
    """What the teacher has seen of a batch, of every token, row after row: what its head reads
    [tokens, width], and what enters the layers asked for [tokens, layers * width]."""

    hidden: Tensor
    features: Tensor | None


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Documents by number into rows that hold them, in the order given as far as it goes."""
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
class Batches:
    """Batches without end. `epoch` and `index` say which comes next, and are all there is to save.

    An epoch takes every record once, but for those of a last batch that is not full.
    """

    records: Sequence[Record]
    row_length: int
    num_rows: int
    prompt_weight: float
    seed: int
    epoch: int = 0
    index: int = 0
    _planned: tuple[int, list[list[int]]] | None = None
    _offsets: npt.NDArray[np.int64] = field(init=False)  # where each record begins, and the end

    def __post_init__(self) -> None:
        lengths = [min(len(record.ids), self.row_length) for record in self.records]
        self._offsets = np.cumsum([0, *lengths], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.take()

    def take(self) -> Batch:
        rows = self._rows()
        first = self.index * self.num_rows
        if first and first + self.num_rows > len(rows):
            self.epoch, self.index, first = self.epoch + 1, 0, 0
            rows = self._rows()
        self.index += 1
        numbers = rows[first : first + self.num_rows]
        picked = [[self.records[i] for i in row] for row in numbers]
        batch = batch_of(picked, self.row_length, self.prompt_weight)
        taken = tuple(number for row in numbers for number in row)
        return replace(batch, records=taken, places=torch.from_numpy(self._places(numbers)))

    def _places(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
        places = np.full((len(rows), self.row_length), self.num_tokens, np.int64)
        for place, numbers in zip(places, rows, strict=True):
            at = 0
            for number in numbers:
                begin, end = self._offsets[number], self._offsets[number + 1]
                place[at : at + end - begin] = np.arange(begin, end)
                at += end - begin
        return places

    def _rows(self) -> list[list[int]]:
        if self._planned is None or self._planned[0] != self.epoch:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.records))
            packed = pack([len(self.records[i].ids) for i in order], self.row_length)
            self._planned = self.epoch, [[int(order[i]) for i in row] for row in packed]
        return self._planned[1]


def batch_of(rows: Sequence[Sequence[Record]], length: int, prompt_weight: float) -> Batch:
    """Rows of records, each cut to what a row holds."""
    shape = (len(rows), length)
    ids, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    numbers, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    sizes: list[int] = []
    for row, records in enumerate(rows):
        at = 0
        for record in records:
            size = min(len(record.ids), length)
            part = slice(at, at + size)
            ids[row, part] = record.ids[:size]
            weights[row, part] = prompt_weight
            weights[row, at + min(record.begin, size) : at + size] = 1.0
            weights[row, at] = 0.0  # nobody predicts the first
            numbers[row, part], positions[row, part] = len(sizes), np.arange(size)
            sizes.append(size)
            at += size
        if at < length:
            numbers[row, at:], positions[row, at:] = len(sizes), np.arange(length - at)
            sizes.append(length - at)
    learned = np.zeros(shape, np.float32)
    learned[:, :-1] = weights[:, 1:]
    return _batch(ids, learned, numbers, positions, sizes)


def _batch(
    ids: npt.NDArray[Any],
    learned: npt.NDArray[Any],
    numbers: npt.NDArray[Any],
    positions: npt.NDArray[Any],
    sizes: list[int],
) -> Batch:
    flat = learned.reshape(-1)
    places = np.flatnonzero(flat)
    bounds = np.cumsum([0, *sizes], dtype=np.int32)
    documents = Documents(
        torch.from_numpy(bounds),
        max(sizes, default=0),
        torch.from_numpy(numbers),
        torch.from_numpy(positions),
    )
    return Batch(
        torch.from_numpy(ids),
        documents,
        torch.from_numpy(places),
        torch.from_numpy(flat[places]),
        torch.from_numpy(positions.reshape(-1)[places]),
    )
