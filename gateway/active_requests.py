"""The active requests of a gateway: their ids, and how to abort them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator

from outrider.api_types.errors import RequestCancelledError, RequestIdInUseError, UnavailableError
from outrider.errors import CapacityError, RequestError
from outrider.gateway.session import Session

MAX_ID_CHARS = 128
IDLE_POLL_S = 0.02
_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_CHARS}}}")


class ActiveRequests:
    """Each request holds a unique id from before it is prepared until its context is left. Ids are
    scoped to the API key: another key's ids can neither collide with them nor be probed."""

    def __init__(self) -> None:
        self._ids: set[tuple[str, str]] = set()  # (name of the key, request id)
        self._held: Counter[str] = Counter()  # requests, by key
        self._sessions: set[Session] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def check_capacity(self, key: str, limit: int) -> None:
        """At the limit, a key below an equal share is still admitted, up to that share and up to
        twice the limit in all: one key cannot lock others out."""
        num_held, held = len(self._ids), self._held.get(key, 0)
        share = limit // (len(self._held) + (held == 0))
        if num_held >= limit and (held >= share or num_held >= 2 * limit):
            raise CapacityError(
                f"{limit} requests are active already (server.max_requests); retry later."
            )

    @contextlib.contextmanager
    def claimed(self, key: str, requested: str, limit: int, *, may_share: bool) -> Iterator[str]:
        """A request id of this key: the requested one, or a random one. `may_share`: a request
        that resumes may find its id in use by its own lost connection, and gets a random one."""
        self.check_capacity(key, limit)
        request_id = self._claim(key, requested, may_share)
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
        """Register the session for `abort` and `stop`."""
        self._sessions.add(session)
        try:
            yield
        finally:
            self._sessions.discard(session)

    async def wait_until_none(self, timeout_s: float) -> None:
        """Wait for all requests to end, or for the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while self._ids and time.monotonic() < deadline_s:
            await asyncio.sleep(IDLE_POLL_S)

    def stop(self) -> None:
        """End all running requests; their clients get an error that the server was stopped."""
        for session in self._sessions:
            session.end(
                UnavailableError(
                    "the server was stopped before the request was finished; send it again to "
                    "another, or when it is back."
                )
            )

    def abort(self, request_id: str) -> int:
        """End the running requests with this id, of any key; returns how many there were."""
        found = [each for each in self._sessions if each.prepared.request_id == request_id]
        for session in found:
            session.end(
                RequestCancelledError(f"the request {request_id!r} was ended by an operator.")
            )
        return len(found)

    def _claim(self, key: str, requested: str, may_share: bool) -> str:
        request_id = requested or secrets.token_hex(8)
        if not _ID.fullmatch(request_id):
            raise RequestError(
                f"request_id is {requested[:MAX_ID_CHARS]!r}; it must be at most {MAX_ID_CHARS} "
                "letters, digits and any of '._:-'."
            )
        if (key, request_id) in self._ids and may_share:
            request_id = secrets.token_hex(8)
        if (key, request_id) in self._ids:
            raise RequestIdInUseError(f"request_id {requested!r} is in use; choose another.")
        self._ids.add((key, request_id))
        return request_id
