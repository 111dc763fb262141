"""Both ends of the exchange between target and draft: outcomes one way, rounds of proposals back.

The engine has sent the next step to both before either needs anything of the other, so a round
takes two hops: outcome to the draft, proposals to the target. Only the first rank of a group is
connected; it broadcasts what it receives, or that it is lost, so the ranks of a group never differ.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.links.channel import wait_any
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkError
from outrider.links.rank_messages import LinkOpened, OutcomeMail, RoundMail, RoundPart
from outrider.scheduler.types import NONE_AHEAD, AheadCounts, Proposal, StepPlan, Ticket
from outrider.workers.groups.collective import Collective
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.outcome_batches import OutcomeBatches
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.ranks.packed_round import (
    PackedRound,
    check_round,
    empty_distributions,
    empty_round,
    is_waiting,
    unpack_round,
    waiting_round,
)
from outrider.workers.ranks.proposal_link import ProposalLink

if TYPE_CHECKING:
    from outrider.workers.gpu.link_rings import LinkRings

logger = logging.getLogger(__name__)

_PART_BYTES = 16 * 2**20
_WAIT_S = 1.0  # at a time, within a group


class ProposalLinkError(OutriderError):
    """The proposal link has failed, and with it the draft."""


class ReceivedRound(NamedTuple):
    """A packed round, and the time the target waited: for drafting and for the transfer."""

    message: Tensor | None = None  # None: no round came
    q: Tensor | None = None
    draft_s: float = 0.0
    transfer_s: float = 0.0
    ahead: AheadCounts = NONE_AHEAD  # since the round before

    def proposals(self, plan: StepPlan) -> Mapping[int, Proposal]:
        """By row; empty if the round was lost."""
        if self.message is None:
            return {}
        return unpack_round(plan, self.message, self.q) or {}

    def joined_with(self, own: Ticket, plan: StepPlan) -> Ticket:
        """The proposals of both, for a step on the host."""
        proposals = {**own.proposals, **self.proposals(plan)}
        return Ticket(plan.step, proposals, own.draft_s, agreements=own.agreements)


NO_ROUND = ReceivedRound()


class TargetMailbox:
    """The target's end. A link that fails, or that the engine releases, yields no proposals."""

    def __init__(
        self,
        group: Collective,
        inbox: RankInbox,
        device: torch.device,
        vocab_size: int,
        on_long_wait: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`on_long_wait` is called once for a step whose round does not come for a second."""
        self._group = group
        self._inbox = inbox
        self._device = device
        self._vocab_size = vocab_size
        self._on_long_wait = on_long_wait
        self._opened: dict[int, ProposalLink] = {}
        self._number = 0
        self._link: ProposalLink | None = None  # only in the first rank
        self._outcomes: OutcomeBatches[bytes] = OutcomeBatches()

    @property
    def has_lost_link(self) -> bool:
        return self._number > 0 and self._link is None

    def add(self, link: ProposalLink) -> None:
        """From the thread that opened it: a step may name this link from now on."""
        self._opened[link.number] = link
        try:
            link.channel.send(LinkOpened())
        except LinkError:
            self._opened.pop(link.number, link).close()
            raise

    @property
    def rings(self) -> LinkRings | None:
        """What the link's devices share."""
        return None if self._link is None else self._link.rings

    def use(self, number: int) -> bool:
        """The link of the next step; 0: none. Returns whether it is another one."""
        if number == self._number:
            return False
        self._close()
        self._number, self._link = number, self._opened.pop(number, None)
        self._inbox.proposal_channel = None if self._link is None else self._link.channel
        for unused in [each for each in list(self._opened) if each < number]:
            self._opened.pop(unused).close()
        self._outcomes = OutcomeBatches()
        return True

    def begin(self, plan: StepPlan) -> None:
        """Before the step: send the outcomes that the draft lacks for its part."""
        if self._number:
            self._send(self._outcomes.before(uses_draft=plan.uses_draft))

    def end(self, plan: StepPlan, outcome: PackedOutcome) -> None:
        """After the step: send its outcome if the next round may need it."""
        if self._number:
            packed = outcome.to_bytes()
            self._send(self._outcomes.after(packed, uses_draft=plan.uses_draft))

    def take(self, plan: StepPlan) -> ReceivedRound:
        """Wait for the proposals of a step with a round."""
        start_s = time.perf_counter()
        found, message, q = self._receive_together(plan)
        if is_waiting(message):
            self._on_long_wait(plan.step)
            while is_waiting(message):
                found, message, q = self._receive_together(plan)
        waited_s = time.perf_counter() - start_s
        if found is None:
            return ReceivedRound(message, q)
        # Late for having caught up: that is reported by itself, and is no part of this round.
        draft_s = min(found.draft_s, waited_s)
        transfer_s = waited_s - draft_s if found.was_idle else 0.0
        return ReceivedRound(message, q, draft_s, transfer_s, found.ahead)

    def _receive_together(self, plan: StepPlan) -> tuple[RoundMail | None, Tensor, Tensor | None]:
        """The round on all ranks, or that it has not come yet: a collective must not wait long."""
        found, message, q = self._receive(plan)
        if self._group.size > 1:
            message, q = self._share(message, q)
        return found, message, q

    def _receive(self, plan: StepPlan) -> tuple[RoundMail | None, Tensor, Tensor | None]:
        lost, link = empty_round(plan), self._link
        if link is None:
            return None, lost, None
        try:
            if not self._inbox.wait_for(link.channel, link.number, _WAIT_S):
                if not self._inbox.is_released(link.number):
                    return None, waiting_round(plan), None
                raise LinkError("the engine has released it.")
            found = link.channel.receive(0.0)
            if not isinstance(found, RoundMail) or found.step != plan.step:
                raise LinkError(f"the draft sent {found!r:.80} where step {plan.step} was due.")
            return found, *self._unpacked(plan, link, found, lost)
        except (LinkError, TimeoutError, RuntimeError, ValueError) as error:
            logger.warning("the round of step %d did not arrive: %s", plan.step, error)
            self._close()
            return None, lost, None

    def _unpacked(
        self, plan: StepPlan, link: ProposalLink, found: RoundMail, lost: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The message and the distributions of a round."""
        message = torch.from_numpy(np.frombuffer(found.packed, dtype=np.int64).copy())
        if message.shape != lost.shape:
            raise LinkError(f"the draft sent {len(message)} words where {len(lost)} were due.")
        check_round(plan, message, self._vocab_size)
        q = empty_distributions(message)
        if q is None:
            return message, None
        if link.transfer is not None:
            return message, link.transfer.receive(q)
        data = bytearray()
        for _ in range(found.num_parts):
            if not self._inbox.wait_for(link.channel, link.number):
                raise LinkError("the engine has released it.")
            part = link.channel.receive(0.0)
            if not isinstance(part, RoundPart):
                raise LinkError(f"the draft sent {part!r:.80} where a part of its round was due.")
            data += part.data
        return message, torch.frombuffer(data, dtype=torch.float32).view(q.shape)

    def _share(self, message: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None]:
        on_device = message.to(self._device)
        self._group.broadcast(on_device, 0)
        message = on_device.cpu()
        empty_q = empty_distributions(message)
        if empty_q is None:
            return message, None
        shared_q = (empty_q if q is None else q).to(self._device)
        self._group.broadcast(shared_q, 0)
        return message, shared_q

    def _send(self, outcomes: Sequence[bytes]) -> None:
        if not outcomes or self._link is None:
            return
        try:
            self._link.channel.send(OutcomeMail(tuple(outcomes)))
        except LinkError as error:
            logger.warning("the draft has missed an outcome: %s", error)
            self._close()

    def _close(self) -> None:
        if self._link is not None:
            self._inbox.proposal_channel = None
            self._link.close()
            self._link = None


class DraftMailbox:
    """The draft's end. Without its target a draft is of no use: failures are raised."""

    def __init__(self, group: Collective, inbox: RankInbox, device: torch.device) -> None:
        self._group = group
        self._inbox = inbox
        self._device = device
        self._link: ProposalLink | None = None  # only in the first rank
        self.was_idle = True  # not late for having caught up: see `RoundMail`

    def use(self, link: ProposalLink) -> None:
        self._link = link
        self._inbox.proposal_channel = link.channel

    def has_outcome(self) -> bool:
        """Whether `receive` would return at once, or fail."""
        return self._link is None or bool(wait_any([self._link.channel], 0.0))

    def receive(self, *, has_caught_up: bool = False) -> list[PackedOutcome]:
        """Wait for the next batch of outcomes. `has_caught_up`: meanwhile, so it may be late."""
        self.was_idle = not (has_caught_up and self.has_outcome())
        if self._group.size == 1:
            outcomes = self._next(None)
        else:
            while (outcomes := self._share(self._next(_WAIT_S))) is None:
                pass  # a collective must not wait as long as a pass of the target may take
        assert outcomes is not None
        return [PackedOutcome.from_bytes(each) for each in outcomes.outcomes]

    def post(
        self, plan: StepPlan, drafted: PackedRound, draft_s: float, ahead: AheadCounts = NONE_AHEAD
    ) -> None:
        """Send a round; called by all ranks of the draft."""
        link = self._link
        if link is None:
            return
        packed, parts = drafted.message.numpy().tobytes(), list[RoundPart]()
        if link.transfer is not None and drafted.q.numel():
            link.transfer.post(drafted.q)
        else:
            parts = _parts(drafted.q)
        mail = RoundMail(plan.step, draft_s, self.was_idle, packed, len(parts), ahead)
        for message in (mail, *parts):
            self._send(link, message)

    def _next(self, timeout_s: float | None) -> OutcomeMail | None:
        """None if it does not come in time, and in other ranks than the first."""
        link = self._link
        if link is None or not self._inbox.wait_for(link.channel, link.number, timeout_s):
            return None
        try:
            outcomes = link.channel.receive(0.0)
        except LinkError as error:
            raise ProposalLinkError(f"no outcome from the target: {error}") from error
        if not isinstance(outcomes, OutcomeMail):
            raise OutriderError(f"the target sent {outcomes!r:.80} where an outcome was due.")
        return outcomes

    def _send(self, link: ProposalLink, message: object) -> None:
        try:
            link.channel.send(message)
        except LinkError as error:
            raise ProposalLinkError(f"the target takes no proposals: {error}") from error

    def _share(self, outcomes: OutcomeMail | None) -> OutcomeMail | None:
        """The first rank's outcomes on all ranks; None if it has none yet."""
        payload = b"" if outcomes is None else RANK_CODEC.encode(outcomes)
        size = torch.tensor([len(payload)], device=self._device)
        self._group.broadcast(size, 0)
        if not (num_bytes := int(size.item())):
            return None
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        if payload:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._group.broadcast(data, 0)
        found: OutcomeMail = RANK_CODEC.decode(data.numpy(force=True).tobytes())
        return found


def _parts(q: Tensor) -> list[RoundPart]:
    data = q.numpy(force=True).tobytes()
    return [RoundPart(data[at : at + _PART_BYTES]) for at in range(0, len(data), _PART_BYTES)]
