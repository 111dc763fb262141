"""A round of proposals as one int64 message whose size follows from the plan alone.

Both sides know the plan, so a rank can take part in a broadcast before the round
exists. A record per drafted row; rows without a proposal are omitted. In rejection mode the
distributions that the draft tokens were sampled from travel beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.scheduler.types import Proposal, RowPlan, StepPlan

_VERSION = 1
_WAITING = -1  # in its place: the round has not come yet
_HEADER = 6  # version, epoch, step, number of rows; number of rows of q and their width
_RECORD = 5  # row, generation, base_len, count, rows of q; then tokens and confidences


_NO_DISTRIBUTIONS = torch.empty((0, 0))


class _Shape(NamedTuple):
    """The most rows and the largest depth of a round of this plan."""

    rows: int
    depth: int

    @classmethod
    def of(cls, plan: StepPlan) -> _Shape:
        depths = [row.depth for row in drafted_rows(plan)]
        return cls(len(depths), max(depths, default=0))

    @property
    def record(self) -> int:
        return _RECORD + 2 * self.depth

    @property
    def size(self) -> int:
        return _HEADER + self.rows * self.record


class PackedRound(NamedTuple):
    message: Tensor
    q: Tensor  # float32 [draft tokens, vocab]: all distributions, concatenated by row; or empty


def pack_round(plan: StepPlan, proposals: Mapping[int, Proposal]) -> PackedRound:
    shape = _Shape.of(plan)
    message = np.zeros(shape.size, dtype=np.int64)
    q = _distributions_of(proposals)
    message[:_HEADER] = (_VERSION, plan.epoch, plan.step, len(proposals), *q.shape)
    records = message[_HEADER:].reshape(shape.rows, shape.record)
    for record, (row, proposal) in zip(records, proposals.items(), strict=False):
        count = len(proposal.tokens)
        num_q = 0 if proposal.q is None else proposal.q.shape[0]
        record[:_RECORD] = (row, proposal.generation, proposal.base_len, count, num_q)
        record[_RECORD : _RECORD + count] = proposal.tokens
        confidences = record[_RECORD + shape.depth :].view(np.float64)
        confidences[:count] = proposal.confidences
    return PackedRound(torch.from_numpy(message), q)


class Drafts(NamedTuple):
    """Of the rows of a round, in the order of the plan."""

    tokens: NDArray[np.int32]  # [rows, depth or more]
    confidences: NDArray[np.float32]  # likewise


def drafted_rows(plan: StepPlan) -> list[RowPlan]:
    """The rows of the plan that the draft model drafts for."""
    return [row for row in plan.rows if row.depth and row.draft_tokens]


class RoundWriter:
    """`pack_round` of a device's round, in which every row has all its drafts; what is known before
    them is written ahead."""

    def __init__(self, plan: StepPlan, base_lens: NDArray[np.int64]) -> None:
        shape, rows = _Shape.of(plan), drafted_rows(plan)
        self._depth = shape.depth
        self._message = np.zeros(shape.size, dtype=np.int64)
        self._message[:_HEADER] = (_VERSION, plan.epoch, plan.step, shape.rows, 0, 0)
        self._records = self._message[_HEADER:].reshape(shape.rows, shape.record)
        if rows:
            self._records[:, :2] = [(row.row, row.generation) for row in rows]
            self._records[:, 2] = base_lens
            self._records[:, 3] = [row.depth for row in rows]

    def write(self, drafts: Drafts) -> PackedRound:
        first = _RECORD + self._depth
        if self._depth:
            self._records[:, _RECORD:first] = drafts.tokens[:, : self._depth]
            confidences = self._records[:, first:].view(np.float64)
            confidences[:] = drafts.confidences[:, : self._depth]
        return PackedRound(torch.from_numpy(self._message), _NO_DISTRIBUTIONS)


class RoundArrays(NamedTuple):
    """A round as arrays: a record per row that has a proposal."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]  # [rows, depth], those beyond a row's count are meaningless
    confidences: NDArray[np.float64]  # likewise


def unpack_arrays(plan: StepPlan, message: Tensor) -> RoundArrays | None:
    """None if the message is empty or another step's."""
    found = _records_of(plan, message)
    if found is None:
        return None
    first = _first_confidence(found)
    confidences = found[:, first:].view(np.float64)
    return RoundArrays(found[:, 0], found[:, 3], found[:, _RECORD:first], confidences)


def check_round(plan: StepPlan, message: Tensor, vocab_size: int) -> None:
    """`ValueError` if the message is no round of this plan."""
    records = _records_of(plan, message)
    if records is None:
        raise ValueError(f"a round that is not of step {plan.step}.")
    planned = {(row.row, row.generation): row.depth for row in drafted_rows(plan)}
    for row, generation, _, count in records[:, :4].tolist():
        if not 0 <= count <= planned.get((row, generation), -1):
            raise ValueError(f"a round with {count} drafts for row {row}, which was not planned.")
    tokens = records[:, _RECORD : _first_confidence(records)]
    if tokens.size and not -1 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"a round with tokens beyond the {vocab_size} there are.")


def _first_confidence(records: NDArray[np.int64]) -> int:
    """The column after the tokens."""
    width: int = records.shape[1]
    return _RECORD + (width - _RECORD) // 2


def _records_of(plan: StepPlan, message: Tensor) -> NDArray[np.int64] | None:
    shape = _Shape.of(plan)
    values: NDArray[np.int64] = message.numpy()
    version, epoch, found, num_rows, _, _ = values[:_HEADER].tolist()
    if (version, epoch, found) != (_VERSION, plan.epoch, plan.step) or not (
        0 <= num_rows <= shape.rows
    ):
        return None
    return values[_HEADER:].reshape(shape.rows, shape.record)[:num_rows]


def unpack_round(plan: StepPlan, message: Tensor, q: Tensor | None) -> dict[int, Proposal] | None:
    """The proposals by row; None if the message is empty or another step's."""
    records = _records_of(plan, message)
    if records is None:
        return None
    confidences = records[:, _first_confidence(records) :].view(np.float64).tolist()
    proposals: dict[int, Proposal] = {}
    first_q = 0
    for record, confidence in zip(records.tolist(), confidences, strict=True):
        row, generation, base_len, count, num_q = record[:_RECORD]
        own_q = None
        if q is not None and num_q:
            own_q = q[first_q : first_q + num_q]
            first_q += num_q
        tokens = record[_RECORD : _RECORD + count]
        proposals[row] = Proposal(generation, base_len, tokens, confidence[:count], own_q)
    return proposals


def empty_round(plan: StepPlan) -> Tensor:
    """Says that the round is lost."""
    return torch.zeros(_Shape.of(plan).size, dtype=torch.int64)


def waiting_round(plan: StepPlan) -> Tensor:
    """What a group shares instead of a round that has not come yet."""
    message = empty_round(plan)
    message[0] = _WAITING
    return message


def is_waiting(message: Tensor) -> bool:
    return int(message[0]) == _WAITING


def _distributions_of(proposals: Mapping[int, Proposal]) -> Tensor:
    parts = [proposal.q for proposal in proposals.values() if proposal.q is not None]
    return torch.cat(parts).float().contiguous() if parts else _NO_DISTRIBUTIONS


def empty_distributions(message: Tensor) -> Tensor | None:
    """Where the distributions that the message announces go; None if it announces none."""
    num_rows, width = message[_HEADER - 2 : _HEADER].tolist()
    return torch.empty((num_rows, width), dtype=torch.float32) if num_rows else None
