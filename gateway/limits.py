"""Rate limits of each key: requests and tokens per minute, and concurrent requests.

A call is charged before its body is read. Each prompt counts as a request, each sample as one
concurrent request.

Each gateway process counts for itself and allows its share of a limit, so a limit is exact only
if connections are spread evenly over the processes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from outrider.api_types.errors import RateLimitError
from outrider.errors import RequestError
from outrider.gateway.auth.caller import Caller

MINUTE_S = 60.0
# A running request may end at any moment.
RETRY_CONCURRENT_S = 1.0


@dataclass(slots=True)
class _Bucket:
    """A token bucket that holds at most one minute's allowance. It may be overdrawn; refills pay
    the debt first."""

    left: float | None = None  # None before it was used
    at_s: float = 0.0

    def refill(self, limit: float, now_s: float) -> float:
        """What is left now, at a refill of `limit` per minute."""
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
    """An admitted call, from before its body is read until it has ended. Its usage is charged to
    its key; the default has no limits."""

    def __init__(self) -> None:
        self.num_samples = 1  # concurrent requests it counts as
        self.count: Callable[[int, int], None] = lambda num_prompts, num_samples: None
        """Call it once the number of prompts, and of samples of each, is known."""
        self.may_detach: Callable[[], bool] = lambda: True  # to continue without its reader
        self._generated: list[Callable[[], int]] = []  # tokens so far, of each of its requests
        self._num_charged = 0  # of the tokens generated
        self._num_read = 0  # tokens of prompts that are not charged yet

    def read(self, num_tokens: int, num_generated: Callable[[], int] = lambda: 0) -> None:
        """Count a prompt's tokens; `num_generated` returns those of its samples so far."""
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
    """Recent usage of one key."""

    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    running: set[Admission] = field(default_factory=set)
    detached_s: deque[float] = field(default_factory=deque)  # when requests lost their readers


class Limits:
    """Admits requests, or refuses them with a retry time. `clock` is that of `time.monotonic`;
    requests may continue for `window_s` without their readers."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, window_s: float = 0.0
    ) -> None:
        self.num_processes = 1  # that share the limits
        self._window_s = window_s
        self._clock = clock
        self._uses: dict[str, _Use] = {}  # by key name; bounded by the configured keys

    def share_of(self, limit: int) -> int:
        """This process's share of a limit."""
        return max(math.ceil(limit / self.num_processes), 1)

    @contextlib.contextmanager
    def admitted(self, caller: Caller) -> Iterator[Admission]:
        """Charge a call; raises `RateLimitError` if its key is at a limit."""
        admission = Admission()
        if not caller.name:
            yield admission
            return
        use = self._uses.setdefault(caller.name, _Use())
        self._check_concurrent(caller, use, 1)
        self._check_tokens(caller, use)
        self._take_request(caller, use)
        admission.count = partial(self._count, caller, use, admission)
        admission.may_detach = partial(self._may_detach, caller, use)
        use.running.add(admission)
        try:
            yield admission
        finally:
            use.running.discard(admission)
            self._charge(caller, use, [admission])

    def _count(
        self, caller: Caller, use: _Use, admission: Admission, num_prompts: int, num_samples: int
    ) -> None:
        """Each prompt is a request, each sample a concurrent one."""
        total, limit = num_prompts * num_samples, caller.limits.max_concurrent
        if limit is not None and total > limit:
            raise RequestError(
                f"n is {num_samples} for {num_prompts} prompts, which are {total} samples at once; "
                f"the key {caller.name!r} may have {limit} (max_concurrent), so send fewer."
            )
        use.running.discard(admission)
        try:
            self._check_concurrent(caller, use, total)
            admission.num_samples = total
        finally:
            use.running.add(admission)
        if caller.limits.requests_per_minute is not None:
            use.requests.take(num_prompts - 1)  # may overdraw: otherwise large calls never pass

    def _check_concurrent(self, caller: Caller, use: _Use, num_more: int) -> None:
        limit = caller.limits.max_concurrent
        if limit is None or not use.running:
            return  # a single call may exceed the share of this process
        num_running = sum(each.num_samples for each in use.running)
        if num_running + num_more > self.share_of(limit):
            raise RateLimitError(
                f"the key {caller.name!r} may have {limit} requests at once and has them; wait for "
                "one to end.",
                retry_after_s=RETRY_CONCURRENT_S,
            )

    def _may_detach(self, caller: Caller, use: _Use) -> bool:
        """As many as the key's concurrent requests: detached ones no longer count as those."""
        limit, now_s = caller.limits.max_concurrent, self._clock()
        if limit is None:
            return True
        while use.detached_s and use.detached_s[0] <= now_s - self._window_s:
            use.detached_s.popleft()
        if len(use.detached_s) >= self.share_of(limit):
            return False
        use.detached_s.append(now_s)
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
        return max(limit / self.num_processes, 1.0)  # below one, nothing would ever be admitted

    def _refuse(self, caller: Caller, what: str, wait_s: float) -> None:
        wait_s = math.ceil(wait_s)
        raise RateLimitError(
            f"the key {caller.name!r} may use {what} a minute and has; try again in {wait_s} s.",
            retry_after_s=wait_s,
        )
