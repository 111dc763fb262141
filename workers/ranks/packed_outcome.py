"""The outcome of a step as one int64 message: what a draft needs of a verdict.

A record per row that sampled. A device writes records without going over its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.scheduler.types import RowVerdict, Verdict

_HEADER = 4  # epoch, step, number of rows, number of columns

Int64s = NDArray[np.int64]


class OutcomeRecord:
    """Columns of a record."""

    ROW = 0
    GENERATION = 1
    NUM_DRAFTED = 2
    BASE_LEN = 3
    NUM_VERIFIED = 4
    NUM_ACCEPTED = 5
    TOKENS = 6  # from here on: the accepted drafts and one more


_TOKENS = OutcomeRecord.TOKENS


class PackedOutcome(NamedTuple):
    epoch: int
    step: int
    records: Int64s  # [rows that sampled, columns]

    def to_bytes(self) -> bytes:
        header = np.array((self.epoch, self.step, *self.records.shape), dtype=np.int64)
        return header.tobytes() + self.records.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> PackedOutcome:
        """`ValueError` if the data does not have the length it announces."""
        values = np.frombuffer(data, dtype=np.int64)
        if len(values) < _HEADER:
            raise ValueError("an outcome without a header")
        epoch, step, *shape = values[:_HEADER].tolist()
        return cls(epoch, step, values[_HEADER:].reshape(shape))

    @classmethod
    def of(cls, verdict: Verdict) -> PackedOutcome:
        sampled = [row for row in verdict.rows if row.tokens]
        width = _TOKENS + max((len(row.tokens) for row in sampled), default=1)
        records = np.zeros((len(sampled), width), dtype=np.int64)
        for record, row in zip(records, sampled, strict=True):
            record[:_TOKENS] = (
                *(row.row, row.generation, row.num_drafted),
                *(row.base_len, row.num_verified, row.num_accepted),
            )
            record[_TOKENS : _TOKENS + len(row.tokens)] = row.tokens
        return cls(verdict.epoch, verdict.step, records)

    def verdict(self) -> Verdict:
        return Verdict(self.epoch, self.step, tuple(map(_row_verdict, self.records.tolist())))


def _row_verdict(record: Sequence[int]) -> RowVerdict:
    row, generation, drafted, base_len, verified, accepted = record[:_TOKENS]
    tokens = (max(token, 0) for token in record[_TOKENS : _TOKENS + accepted + 1])  # as committed
    return RowVerdict(row, generation, base_len, drafted, verified, accepted, tuple(tokens))
