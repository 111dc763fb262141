"""What each caller may use: requests and tokens a minute, and requests at once.

A call is charged before its body is read, so that reading is within its limits. Each prompt counts
as a request, each sample as one of those at once.

Each gateway process counts for itself and allows its share of a limit, so the whole is kept only
as evenly as connections are spread over the processes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from outrider.errors import RequestError
from outrider.gateway.caller import Caller
from outrider.gateway.errors import RateLimitError

MINUTE_S = 60.0
# A place may be free at any moment, so there is no better time to tell.
RETRY_CONCURRENT_S = 1.0


@dataclass(slots=True)
class _Bucket:
    """What is left of an allowance that comes back evenly; at most that of a minute. It may be
    overdrawn, and then what comes back pays for that first."""

    left: float | None = None  # None before it was used
    at_s: float = 0.0

    def refill(self, limit: float, now_s: float) -> float:
        """What is left now, where `limit` comes back in a minute."""
        if self.left is None:
            self.left = limit
        else:
            self.left = min(self.left + (now_s - self.at_s) * limit / MINUTE_S, limit)
        self.at_s = now_s
        return self.left

    def take(self, amount: float) -> None:
        assert self.left is not None
        self.left -= amount


class Admission:
    """A call that was let in, from before its body is read until it has ended. What it uses is
    charged to its key; by itself it is one without limits."""

    def __init__(self) -> None:
        self.num_samples = 1  # it counts as, of those that a key may have at once
        self.count: Callable[[int, int], None] = lambda num_prompts, num_samples: None
        """Call it once the prompts of the call, and the samples of each, are known."""
        self.may_be_left: Callable[[], bool] = lambda: True  # to go on without its reader
        self._generated: list[Callable[[], int]] = []  # tokens so far, of each of its requests
        self._num_charged = 0  # of the tokens generated
        self._num_read = 0  # tokens of prompts that are not charged yet

    def read(self, num_tokens: int, num_generated: Callable[[], int] = lambda: 0) -> None:
        """A prompt has so many tokens, and its samples as many as the function says."""
        self._num_read += num_tokens
        self._generated.append(num_generated)

    def take_uncharged(self) -> int:
        """Tokens since the last time."""
        generated = sum(each() for each in self._generated)
        new = self._num_read + generated - self._num_charged
        self._num_read, self._num_charged = 0, generated
        return new


@dataclass(slots=True)
class _Use:
    """What one key has used lately."""

    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    running: set[Admission] = field(default_factory=set)
    left_s: deque[float] = field(default_factory=deque)  # when requests lost their readers


class Limits:
    """Lets requests in, or says when to come again. `clock` is that of `time.monotonic`; requests
    may go on for `window_s` without their readers."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, window_s: float = 0.0
    ) -> None:
        self.num_processes = 1  # that share the limits
        self._window_s = window_s
        self._clock = clock
        self._uses: dict[str, _Use] = {}  # by the names of keys, which are as many as configured

    def share_of(self, limit: int) -> int:
        """What this process may do of what all may do at once."""
        return max(math.ceil(limit / self.num_processes), 1)

    @contextlib.contextmanager
    def admitted(self, caller: Caller) -> Iterator[Admission]:
        """Charges a call; raises `RateLimitError` if its key has used what it may for now."""
        admission = Admission()
        if not caller.name:
            yield admission
            return
        use = self._uses.setdefault(caller.name, _Use())
        self._check_concurrent(caller, use, 1)
        self._check_tokens(caller, use)
        self._take_request(caller, use)
        admission.count = partial(self._count, caller, use, admission)
        admission.may_be_left = partial(self._may_be_left, caller, use)
        use.running.add(admission)
        try:
            yield admission
        finally:
            use.running.discard(admission)
            self._charge(caller, use, [admission])

    def _count(
        self, caller: Caller, use: _Use, admission: Admission, num_prompts: int, num_samples: int
    ) -> None:
        """Each prompt is a request, and each sample one of those that run at once."""
        total, most = num_prompts * num_samples, caller.limits.max_concurrent
        if most is not None and total > most:
            raise RequestError(
                f"n is {num_samples} for {num_prompts} prompts, which are {total} samples at once; "
                f"the key {caller.name!r} may have {most} (max_concurrent), so send fewer."
            )
        use.running.discard(admission)
        try:
            self._check_concurrent(caller, use, total)
            admission.num_samples = total
        finally:
            use.running.add(admission)
        if caller.limits.requests_per_minute is not None:
            use.requests.take(num_prompts - 1)  # may overdraw, so that it can succeed at all

    def _check_concurrent(self, caller: Caller, use: _Use, num_more: int) -> None:
        most = caller.limits.max_concurrent
        if most is None or not use.running:
            return  # alone it may have more than the share of this process
        num_running = sum(each.num_samples for each in use.running)
        if num_running + num_more > self.share_of(most):
            raise RateLimitError(
                f"the key {caller.name!r} may have {most} requests at once and has them; wait for "
                "one to end.",
                retry_after_s=RETRY_CONCURRENT_S,
            )

    def _may_be_left(self, caller: Caller, use: _Use) -> bool:
        """As many as the caller may have at once: whoever leaves them has others let in."""
        most, now_s = caller.limits.max_concurrent, self._clock()
        if most is None:
            return True
        while use.left_s and use.left_s[0] <= now_s - self._window_s:
            use.left_s.popleft()
        if len(use.left_s) >= self.share_of(most):
            return False
        use.left_s.append(now_s)
        return True

    def _check_tokens(self, caller: Caller, use: _Use) -> None:
        limit = caller.limits.tokens_per_minute
        if limit is None:
            return
        self._charge(caller, use, use.running)
        left, share = use.tokens.left, self._share_a_minute(limit)
        if left is not None and left <= 0.0:
            self._refuse(caller, f"{limit} tokens", (1.0 - left) * MINUTE_S / share)

    def _take_request(self, caller: Caller, use: _Use) -> None:
        limit = caller.limits.requests_per_minute
        if limit is None:
            return
        share = self._share_a_minute(limit)
        left = use.requests.refill(share, self._clock())
        if left < 1.0:
            self._refuse(caller, f"{limit} requests", (1.0 - left) * MINUTE_S / share)
        use.requests.take(1.0)

    def _charge(self, caller: Caller, use: _Use, admissions: Iterable[Admission]) -> None:
        limit = caller.limits.tokens_per_minute
        if limit is not None:
            use.tokens.refill(self._share_a_minute(limit), self._clock())
            use.tokens.take(sum(each.take_uncharged() for each in admissions))

    def _share_a_minute(self, limit: int) -> float:
        return max(limit / self.num_processes, 1.0)  # less than one would let nothing in, ever

    def _refuse(self, caller: Caller, what: str, wait_s: float) -> None:
        wait_s = math.ceil(wait_s)
        raise RateLimitError(
            f"the key {caller.name!r} may use {what} a minute and has; try again in {wait_s} s.",
            retry_after_s=wait_s,
        )
