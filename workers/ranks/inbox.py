"""A rank's messages from its engine."""

from __future__ import annotations

from collections import deque

from outrider.links.channel import Channel, wait_any
from outrider.links.rank_messages import ReleaseLink


class RankInbox:
    """Messages in order. While a rank waits for another process, later messages are kept, and a
    `ReleaseLink` ends the wait."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: deque[object] = deque()
        self._released = 0  # this proposal link and all before it

    def receive(self) -> object:
        while True:
            message = self._kept.popleft() if self._kept else self._channel.receive()
            if not isinstance(message, ReleaseLink):
                return message
            self._released = max(self._released, message.link)

    def wait_for(self, other: Channel, link: int) -> bool:
        """Wait until `other`, which is proposal link `link`, has a message or has failed. False if
        the engine releases the link first. Raises if the engine is gone."""
        while self._released < link:
            ready = wait_any([other, self._channel])
            if other in ready:
                return True
            message = self._channel.receive(0.0)
            if isinstance(message, ReleaseLink):
                self._released = max(self._released, message.link)
            else:
                self._kept.append(message)
        return False
