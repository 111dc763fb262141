"""A rank's messages from its engine."""

from __future__ import annotations

import math
import time
from collections import deque

from outrider.links.channel import Channel, wait_any, wait_reading
from outrider.links.rank_messages import ReleaseLink


class RankInbox:
    """Messages in order. While a rank waits for another process, later messages are kept, and a
    `ReleaseLink` ends the wait."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: deque[object] = deque()
        self._released = 0  # this proposal link and all before it
        self.proposal_channel: Channel | None = None  # the proposal link, which is read meanwhile
        self.spin_s = 0.0  # in `wait_for`, before it sleeps: waking takes longer than a message

    def receive(self) -> object:
        while not self._kept:
            if self.proposal_channel is not None:
                wait_reading(self._channel, self.proposal_channel)
            self._keep(self._channel.receive())
        return self._kept.popleft()

    def has_message(self) -> bool:
        """Whether `receive` would return at once. Raises if the engine is gone."""
        while not self._kept and wait_any([self._channel], 0.0):
            self._keep(self._channel.receive(0.0))
        return bool(self._kept)

    def wait_for(self, other: Channel, link: int, timeout_s: float | None = None) -> bool:
        """Wait until `other`, which is proposal link `link`, has a message or has failed, or the
        engine releases it, or until the timeout; whether it has one. Raises if the engine is
        gone."""
        started_s = time.monotonic()
        deadline_s = math.inf if timeout_s is None else started_s + timeout_s
        while not self.is_released(link):
            now_s = time.monotonic()
            left_s = None if timeout_s is None else max(deadline_s - now_s, 0.0)
            spins = now_s < started_s + self.spin_s
            ready = wait_any([other, self._channel], 0.0 if spins else left_s)
            if self._channel in ready:
                self._keep(self._channel.receive(0.0))
            if other in ready or now_s >= deadline_s:
                return other in ready
        return False

    def is_released(self, link: int) -> bool:
        return self._released >= link

    def _keep(self, message: object) -> None:
        if isinstance(message, ReleaseLink):
            self._released = max(self._released, message.link)
        else:
            self._kept.append(message)
