"""The requests a gateway has in hand: their ids, and who may end them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator

from outrider.errors import CapacityError, RequestError
from outrider.gateway.errors import RequestCancelledError, RequestIdInUseError, UnavailableError
from outrider.gateway.session import Session

MAX_ID_CHARS = 128
IDLE_POLL_S = 0.02
_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_CHARS}}}")


class InHand:
    """Each has an id of its own from before it is prepared until its context is left. Ids are those
    of a key: what other keys use can neither collide with them nor be found out."""

    def __init__(self) -> None:
        self._ids: set[tuple[str, str]] = set()  # with the names of their keys
        self._held: Counter[str] = Counter()  # requests, by key
        self._sessions: set[Session] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def check_room(self, key: str, most: int) -> None:
        """When full, a key below an equal share is still let in: one key cannot lock others out.
        Each is let in up to such a share, and all together up to twice as many."""
        num_held, held = len(self._ids), self._held.get(key, 0)
        share = most // (len(self._held) + (held == 0))
        if num_held >= most and (held >= share or num_held >= 2 * most):
            raise CapacityError(
                f"{most} requests are in hand already (server.max_requests); retry later."
            )

    @contextlib.contextmanager
    def taken(self, key: str, wanted: str, most: int, *, may_share: bool) -> Iterator[str]:
        """An id of the key of that name, the wanted one if there is any. `may_share`: the request
        that has it may be of the same client, cut off without our notice; then it is another."""
        self.check_room(key, most)
        request_id = self._claim(key, wanted, may_share)
        self._held[key] += 1
        try:
            yield request_id
        finally:
            self._ids.discard((key, request_id))
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    @contextlib.contextmanager
    def running(self, session: Session) -> Iterator[None]:
        """Within reach of `abort` and `stop`."""
        self._sessions.add(session)
        try:
            yield
        finally:
            self._sessions.discard(session)

    async def wait_until_none(self, timeout_s: float) -> None:
        """Or until the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while self._ids and time.monotonic() < deadline_s:
            await asyncio.sleep(IDLE_POLL_S)

    def stop(self) -> None:
        """End what runs; clients are told that the server was stopped."""
        for session in self._sessions:
            session.end(
                UnavailableError(
                    "the server was stopped before the request was finished; send it again to "
                    "another, or when it is back."
                )
            )

    def abort(self, request_id: str) -> int:
        """End the running requests of that id, of whichever keys; how many there were."""
        found = [each for each in self._sessions if each.prepared.request_id == request_id]
        for session in found:
            session.end(
                RequestCancelledError(f"the request {request_id!r} was ended by an operator.")
            )
        return len(found)

    def _claim(self, key: str, wanted: str, may_share: bool) -> str:
        request_id = wanted or secrets.token_hex(8)
        if not _ID.fullmatch(request_id):
            raise RequestError(
                f"request_id is {wanted[:MAX_ID_CHARS]!r}; it must be at most {MAX_ID_CHARS} "
                "letters, digits and any of '._:-'."
            )
        if (key, request_id) in self._ids and may_share:
            request_id = secrets.token_hex(8)
        if (key, request_id) in self._ids:
            raise RequestIdInUseError(f"request_id {wanted!r} is in use; choose another.")
        self._ids.add((key, request_id))
        return request_id
