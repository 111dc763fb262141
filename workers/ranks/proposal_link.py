"""The proposal link: a connection between the first ranks of target and draft.

The target listens, at an address that it writes into the engine's rendezvous store, and the draft
dials in with the engine's secret. Rounds travel as messages, and between GPUs of one host through
shared memory before that. Under rejection sampling NCCL moves the distributions of their draft
tokens from GPU to GPU.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.errors import ConfigError
from outrider.links.address import TcpAddress
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkError
from outrider.links.handshake import dial_in
from outrider.links.listener import Listener
from outrider.links.rank_messages import (
    Hello,
    LinkOpened,
    MemoryOffered,
    MemoryShared,
    Role,
    proposal_meeting,
)
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.ranks.device_transfer import DeviceTransfer

if TYPE_CHECKING:
    from outrider.workers.gpu.link_rings import LinkRings, RingShape

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 30.0
_REFUSAL = "!"  # before the reason, in the place of an address


@dataclass(frozen=True, slots=True)
class ProposalLink:
    """One end. `transfer` carries distributions between GPUs; `rings` are what they share."""

    number: int
    channel: Channel
    transfer: DeviceTransfer | None
    rings: LinkRings | None = None

    @property
    def backend(self) -> str:
        if self.rings is not None:
            return "shared memory"
        return "tcp" if self.transfer is None else "nccl"

    def close(self) -> None:
        self.channel.close()
        if self.transfer is not None:
            self.transfer.close()


@dataclass(frozen=True, slots=True)
class LinkOpener:
    """What a rank needs to open its end of a proposal link. `moves_tensors`: rounds have
    distributions beside them."""

    store: LinkStore
    secret: str
    device: torch.device
    transfer_timeout_s: float
    moves_tensors: bool = False
    ring_shape: RingShape | None = None  # of the memory that this end can share

    def listen(self, number: int) -> ProposalLink:
        """The target's end. The draft waits for its `LinkOpened`."""
        address = str(TcpAddress(self.store.own_host, 0))
        try:
            listener = Listener([address], self.secret, {Role.DRAFT: 1})
        except ConfigError as error:
            self.store.set(_address_key(number), f"{_REFUSAL}{error}")
            raise
        with closing(listener):
            self.store.set(_address_key(number), listener.addresses[0])
            try:
                [arrival] = listener.take_group(Role.DRAFT, _JOIN_TIMEOUT_S)
            except queue.Empty:
                raise LinkError("the draft has not dialled in.") from None
        return self._completed(number, arrival.channel, is_target=True)

    def dial(self, number: int) -> ProposalLink:
        """The draft's end; returns once the target uses the link."""
        address = self.store.get(_address_key(number)).decode()
        if address.startswith(_REFUSAL):
            raise LinkError(f"the target opens no link: {address.removeprefix(_REFUSAL)}")
        hello = Hello(Role.DRAFT, 0, 1, os.getpid(), socket.gethostname())
        sock = dial_in(address, self.secret, hello, _JOIN_TIMEOUT_S)
        channel = Channel(sock, RANK_CODEC, peer="the target")
        link = self._completed(number, channel, is_target=False)
        if not isinstance(channel.receive(_JOIN_TIMEOUT_S), LinkOpened):
            raise LinkError("the target did not open the link.")
        return link

    def _completed(self, number: int, channel: Channel, *, is_target: bool) -> ProposalLink:
        """With what the devices exchange beside messages; closes the channel if that fails."""
        transfer = None
        try:
            if self.device.type == "cuda" and self.moves_tensors:
                transfer = DeviceTransfer(
                    self.store, number, self.device, self.transfer_timeout_s, is_target=is_target
                )
                transfer.meet()
            rings = self._offer(channel) if is_target else self._accept(channel)
        except BaseException:
            channel.close()
            if transfer is not None:
                transfer.close()
            raise
        return ProposalLink(number, channel, transfer, rings)

    def _offer(self, channel: Channel) -> LinkRings | None:
        """Memory shared with the draft's device, if both can share it."""
        memory = None
        if self.ring_shape is not None:
            from outrider.workers.gpu.link_rings import SharedMemory

            try:
                memory = SharedMemory(self.ring_shape)
            except (OSError, RuntimeError) as error:
                logger.warning("this device shares no memory: %s", error)
        try:
            channel.send(MemoryOffered("" if memory is None else memory.name))
            found = channel.receive(_JOIN_TIMEOUT_S)
        finally:
            if memory is not None:
                memory.unlink()
        if not isinstance(found, MemoryShared):
            raise LinkError("the draft did not answer a MemoryOffered.")
        return memory.rings if memory is not None and found.is_shared else None

    def _accept(self, channel: Channel) -> LinkRings | None:
        offered = channel.receive(_JOIN_TIMEOUT_S)
        if not isinstance(offered, MemoryOffered):
            raise LinkError("the target did not begin with a MemoryOffered.")
        rings = None
        if offered.name and self.ring_shape is not None:
            from outrider.workers.gpu.link_rings import open_shared

            rings = open_shared(offered.name, self.ring_shape)
        channel.send(MemoryShared(rings is not None))
        return rings


def _address_key(number: int) -> str:
    return f"{proposal_meeting(number)}/address"
