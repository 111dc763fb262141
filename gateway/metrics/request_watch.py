"""Metrics and the access log of one request, of any protocol."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import TYPE_CHECKING

from outrider.api_types.errors import DeadlineError, RequestCancelledError
from outrider.errors import OutriderError
from outrider.gateway.metrics.access_log import FINISHED, REFUSED, AccessLog
from outrider.gateway.metrics.requests import (
    ABORT,
    DEADLINE,
    ENGINE_LOST,
    ERROR,
    GatewayMetrics,
    refusal_of,
)
from outrider.scheduler.types import FinishReason
from outrider.text.outputs import RequestMetrics

if TYPE_CHECKING:
    from outrider.gateway.calls import Call
    from outrider.gateway.session import Session

_GONE = (asyncio.CancelledError, GeneratorExit, RequestCancelledError)


class RequestWatch:
    """Observes a call from its arrival until its context is left.

    `model` is the served name that it is counted under, not what the client sent.
    """

    __slots__ = (
        "_call",
        "_last_s",
        "_log",
        "_metrics",
        "_session",
        "_start_s",
        "model",
    )

    def __init__(self, call: Call, model: str, metrics: GatewayMetrics, log: AccessLog) -> None:
        self.model = model
        self._call = call
        self._metrics = metrics
        self._log = log
        self._session: Session | None = None
        self._start_s = time.monotonic()
        self._last_s: dict[int, float] = {}  # when each sample's last tokens came

    def __enter__(self) -> RequestWatch:
        self._metrics.active.inc()
        return self

    def begin(self, session: Session) -> Session:
        """The request is checked and about to run."""
        self._session = session
        session.watch = self
        return session

    def see(self, index: int, num_tokens: int, now_s: float) -> None:
        """A sample got new tokens."""
        if not num_tokens:
            return
        last_s = self._last_s.get(index)
        if not self._last_s:
            self._see_first(now_s)
        self._last_s[index] = now_s
        gap_s = None if last_s is None else now_s - last_s
        self._metrics.add_tokens(self.model, num_tokens, gap_s, now_s)

    def _see_first(self, now_s: float) -> None:
        assert self._session is not None
        output, counts = self._session.output, self._metrics.of(self.model)
        counts.prompt_tokens.inc(len(output.prompt_token_ids))
        counts.histograms["time_to_first_token_seconds"].observe(now_s - self._start_s)
        counts.histograms["request_queue_time_seconds"].observe(output.metrics.queued_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        total_s = time.monotonic() - self._start_s
        is_refused, reason = self._outcome(error)
        counts = self._metrics.of(self.model)
        if is_refused:
            counts.refused[reason].inc()
        else:
            counts.finished[reason].inc()
            self._observe_sizes(total_s)
        self._metrics.flush()
        if self._log.is_enabled:
            self._log.write(
                self._call,
                self._session,
                model=self.model,
                status=REFUSED if is_refused else FINISHED,
                reason=reason,
                start_s=self._start_s,
                total_s=total_s,
            )
        self._metrics.active.dec()

    def _outcome(self, error: BaseException | None) -> tuple[bool, str]:
        """Whether it was refused before its first token, and the reason of its end."""
        session = self._session
        if session is not None and session.output.finished:
            reasons = {each.finish_reason for each in session.output.outputs}
            longest = FinishReason.LENGTH in reasons
            return False, (FinishReason.LENGTH if longest else FinishReason.STOP).value
        if error is None or isinstance(error, _GONE):
            return False, ABORT
        if isinstance(error, DeadlineError):
            return False, DEADLINE
        if isinstance(error, OutriderError) and not self._last_s:
            return True, refusal_of(error)
        return False, ERROR

    def _observe_sizes(self, total_s: float) -> None:
        histograms = self._metrics.of(self.model).histograms
        histograms["e2e_request_latency_seconds"].observe(total_s)
        if self._session is None:
            return
        output, params = self._session.output, self._session.prepared.spec.params
        lengths = [len(each.token_ids) for each in output.outputs]
        longest = max(lengths, default=0)
        for name, size in (
            ("request_prompt_tokens", len(output.prompt_token_ids)),
            ("request_generation_tokens", sum(lengths)),
            ("request_max_num_generation_tokens", longest),
            ("request_params_n", params.n),
            ("request_params_max_tokens", params.max_tokens),
        ):
            if size is not None:
                histograms[name].observe(size)
        self._observe_phases(output.metrics, longest)
        self._metrics.resume(self.model, ENGINE_LOST, self._session.resubmissions)

    def _observe_phases(self, times: RequestMetrics, longest: int) -> None:
        """Observe the phases of a request that had a token."""
        histograms, first_s = self._metrics.of(self.model).histograms, times.first_token_s
        if first_s is None or not self._last_s:
            return
        decode_s = max(max(self._last_s.values()) - first_s, 0.0)
        prefill_s = max(first_s - times.arrival_s - times.queued_s, 0.0)
        histograms["request_prefill_time_seconds"].observe(prefill_s)
        histograms["request_decode_time_seconds"].observe(decode_s)
        histograms["request_inference_time_seconds"].observe(prefill_s + decode_s)
        if longest > 1:
            gap_s = decode_s / (longest - 1)
            histograms["request_time_per_output_token_seconds"].observe(gap_s)
