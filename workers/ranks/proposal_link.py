"""Transfers proposals from the first draft rank to the first target rank.

They travel through a process group of two, in messages whose size both sides know from the plan: an
int64 tensor with a header and one record per drafted row, and in rejection mode the distributions
that the draft tokens were sampled from. The draft posts its sends and announces the round on its
control link; only then does the target post its receives, so it never waits for a round that was
not sent. If the other side dies in between, the receive fails and the round counts as lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.catalog.proposers import DRAFT
from outrider.links.rank_messages import proposal_meeting
from outrider.scheduler.types import Proposal, StepPlan
from outrider.workers.groups.collective import Collective
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.groups.process_group import Group, make_group

logger = logging.getLogger(__name__)

_VERSION = 1
_HEADER = 6  # version, epoch, round, number of rows; number of rows of q and their width
_RECORD = 5  # row, generation, base_len, count, rows of q; then tokens and confidences
_TARGET, _DRAFT = 0, 1  # ranks in the group of two
_GREETING_TIMEOUT_S = 10.0
_POLL_S = 20e-6


class _Shape(NamedTuple):
    """The most rows and the largest depth of a round of this plan."""

    rows: int
    depth: int

    @classmethod
    def of(cls, plan: StepPlan) -> _Shape:
        depths = [row.depth for row in plan.rows if row.proposer == DRAFT]
        return cls(len(depths), max(depths, default=0))

    @property
    def record(self) -> int:
        return _RECORD + 2 * self.depth

    @property
    def size(self) -> int:
        return _HEADER + self.rows * self.record


def pack_round(plan: StepPlan, number: int, proposals: Mapping[int, Proposal]) -> Tensor:
    """int64 message of the plan's size; rows without a proposal are omitted."""
    shape = _Shape.of(plan)
    message = np.zeros(shape.size, dtype=np.int64)
    q_shape = _q_of(proposals).shape
    message[:_HEADER] = (_VERSION, plan.epoch, number, len(proposals), *q_shape)
    records = message[_HEADER:].reshape(shape.rows, shape.record)
    for record, (row, proposal) in zip(records, proposals.items(), strict=False):
        count = len(proposal.tokens)
        num_q = 0 if proposal.q is None else proposal.q.shape[0]
        record[:_RECORD] = (row, proposal.generation, proposal.base_len, count, num_q)
        record[_RECORD : _RECORD + count] = proposal.tokens
        confidences = record[_RECORD + shape.depth :].view(np.float64)
        confidences[:count] = proposal.confidences
    return torch.from_numpy(message)


def unpack_round(
    plan: StepPlan, number: int, message: Tensor, q: Tensor | None
) -> dict[int, Proposal] | None:
    """The proposals by row; None if the message is another round's."""
    shape = _Shape.of(plan)
    values = message.numpy()
    version, epoch, found, num_rows, _, _ = values[:_HEADER].tolist()
    if (version, epoch, found) != (_VERSION, plan.epoch, number) or num_rows > shape.rows:
        return None
    records = values[_HEADER:].reshape(shape.rows, shape.record)[:num_rows]
    confidences = records[:, _RECORD + shape.depth :].view(np.float64).tolist()
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


class ProposalLink:
    """One side of the group of two. A link that failed cannot be used again."""

    def __init__(
        self,
        store: LinkStore,
        number: int,
        device: torch.device,
        transfer_timeout_s: float,
        *,
        is_target: bool,
    ) -> None:
        rank = _TARGET if is_target else _DRAFT
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.num_sends = 0
        self._peer = 1 - rank
        self._device = device
        self._transfer_timeout_s = transfer_timeout_s
        self._store = store
        self._group: Group = make_group(store, proposal_meeting(number), rank, 2, device)
        self._pending: list[tuple[Tensor, object]] = []  # tensors must outlive their sends

    def greet(self) -> None:
        """The draft's first message; returns once the target has joined.

        NCCL connects at the first transfer of a direction, and blocks until both sides join: within
        a step that would deadlock, because rounds are sent before they are received.
        """
        greeting = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._finish(self._send(greeting), _GREETING_TIMEOUT_S)

    def await_greeting(self) -> None:
        self._receive(torch.zeros(1, dtype=torch.int64), _GREETING_TIMEOUT_S)

    def send(self, plan: StepPlan, number: int, proposals: Mapping[int, Proposal]) -> None:
        """Post a round. Returns at once; the target receives it later."""
        self._pending.clear()
        self._post(pack_round(plan, number, proposals))
        q = _q_of(proposals)
        if q.numel():
            self._post(q)
        self.num_sends += 1

    def receive(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """The announced round, as `unpack_round` takes it; RuntimeError if it is lost."""
        limit_s = self._transfer_timeout_s
        message = self._receive(torch.zeros(_Shape.of(plan).size, dtype=torch.int64), limit_s)
        empty_q = _empty_q(message)
        return message, None if empty_q is None else self._receive(empty_q, limit_s)

    def close(self) -> None:
        """Abort the group without waiting: the other side may be dead."""
        if self.backend == "nccl":
            self._group.abort()
        self._pending.clear()

    def _post(self, tensor: Tensor) -> None:
        tensor = tensor.to(self._device)
        self._pending.append((tensor, self._send(tensor)))

    def _send(self, tensor: Tensor) -> object:
        return self._group.send([tensor], self._peer, 0)

    def _receive(self, tensor: Tensor, limit_s: float) -> Tensor:
        on_device = tensor.to(self._device)
        self._finish(self._group.recv([on_device], self._peer, 0), limit_s)
        return on_device.cpu()

    def _finish(self, work: object, limit_s: float) -> None:
        """Wait on the host, with a timeout: NCCL's own `wait` only orders streams."""
        if self.backend == "gloo":
            work.wait(timedelta(seconds=limit_s))  # type: ignore[attr-defined]
            return
        deadline_s = time.monotonic() + limit_s
        while not work.is_completed():  # type: ignore[attr-defined]
            if time.monotonic() > deadline_s:
                self._group.abort()
                raise RuntimeError(f"no proposals within {limit_s:g} s")
            time.sleep(_POLL_S)
        work.wait()  # type: ignore[attr-defined]


class ProposalInbox:
    """Gives all target ranks the same round: the first receives it and broadcasts it.

    The broadcast includes whether it arrived at all, so the ranks never disagree.
    """

    def __init__(self, group: Collective, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._link: ProposalLink | None = None

    def connect(self, link: ProposalLink) -> None:
        """Use this link from the next round on (first rank only)."""
        if self._link is not None:
            self._link.close()
        self._link = link

    def take(self, plan: StepPlan, number: int) -> dict[int, Proposal] | None:
        """The announced round, or None if it was lost."""
        message, q = self._receive(plan)
        if self._group.size > 1:
            message, q = self._share(message, q)
        return unpack_round(plan, number, message, q)

    def _receive(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        lost = torch.zeros(_Shape.of(plan).size, dtype=torch.int64)
        if self._link is None:
            return lost, None
        try:
            return self._link.receive(plan)
        except RuntimeError as error:
            logger.warning("the round of step %d did not arrive: %s", plan.step, error)
            self._link.close()
            self._link = None
            return lost, None

    def _share(self, message: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None]:
        on_device = message.to(self._device)
        self._group.broadcast(on_device, 0)
        message = on_device.cpu()
        empty_q = _empty_q(message)
        if empty_q is None:
            return message, None
        shared_q = (empty_q if q is None else q).to(self._device)
        self._group.broadcast(shared_q, 0)
        return message, shared_q


def _q_of(proposals: Mapping[int, Proposal]) -> Tensor:
    """float32 [draft tokens, vocab]: all distributions of a round, concatenated by row."""
    parts = [proposal.q for proposal in proposals.values() if proposal.q is not None]
    return torch.cat(parts).float().contiguous() if parts else torch.empty((0, 0))


def _empty_q(message: Tensor) -> Tensor | None:
    num_rows, width = message[_HEADER - 2 : _HEADER].tolist()
    return torch.empty((num_rows, width), dtype=torch.float32) if num_rows else None
