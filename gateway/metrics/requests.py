"""A gateway process's request metrics, for Prometheus.

Nothing is written per token: inter-token latencies are tallied in plain lists and flushed several
times a second, and when a request ends. With PROMETHEUS_MULTIPROC_DIR in the environment before
this is imported, counts go to files in that folder, to be summed over all processes; see
`outrider.gateway.metrics.files`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.api_types.errors import (
    ForbiddenError,
    RateLimitError,
    RequestIdInUseError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
)
from outrider.errors import CapacityError, OutriderError, RequestError
from outrider.gateway.metrics.files import counts_in_memory
from outrider.gateway.metrics.names import BY_NAME, MetricKind
from outrider.scheduler.types import FinishReason

FLUSH_EVERY_S = 0.25

# Why a request ended, in vLLM's words where it has them, and why one was not begun.
ABORT, DEADLINE, ERROR = "abort", "deadline", "error"
FINISH_REASONS = (FinishReason.STOP.value, FinishReason.LENGTH.value, ABORT, DEADLINE, ERROR)
_REFUSALS: dict[type[OutriderError], str] = {
    RequestError: "invalid",
    UnknownModelError: "unknown_model",
    RequestIdInUseError: "id_in_use",
    UnauthenticatedError: "unauthenticated",
    ForbiddenError: "forbidden",
    RateLimitError: "rate_limit",
    CapacityError: "overloaded",
    UnavailableError: "unavailable",
    OutriderError: ERROR,
}
REFUSAL_REASONS = tuple(_REFUSALS.values())
ENGINE_LOST, CLIENT_BACK = "engine_lost", "client_back"
RESUME_REASONS = (ENGINE_LOST, CLIENT_BACK)

_GAPS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0),
    *(1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_LATENCIES_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_QUEUE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, *_LATENCIES_S)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_BUCKETS: dict[str, Sequence[float]] = {
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "time_to_first_token_seconds": _FIRST_TOKEN_S,
    "inter_token_latency_seconds": _GAPS_S,
    "request_time_per_output_token_seconds": _GAPS_S,
    "e2e_request_latency_seconds": _LATENCIES_S,
    "request_queue_time_seconds": _QUEUE_S,
    "request_prefill_time_seconds": _QUEUE_S,
    "request_decode_time_seconds": _LATENCIES_S,
    "request_inference_time_seconds": _LATENCIES_S,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_params_max_tokens": _TOKENS,
}


def refusal_of(error: OutriderError) -> str:
    """The reason for an error's class, or for its nearest base class."""
    return next(_REFUSALS[kind] for kind in type(error).__mro__ if kind in _REFUSALS)


class _TallyHistogram(Histogram):
    """Takes many observations at once."""

    # Inherited, but not declared in the library's types.
    _buckets: list[Any]
    _sum: Any

    def take(self, counts: Sequence[int], total: float) -> None:
        """`counts` are per bucket, as `bisect_left` chooses it."""
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)


class _OfModel:
    """The metrics of one model. Every series exists from the start: a rate needs a zero."""

    def __init__(self, parents: dict[str, Any], model: str) -> None:
        self.finished = {
            reason: parents["request_success"].labels(model, reason) for reason in FINISH_REASONS
        }
        self.refused = {
            reason: parents["refused_requests"].labels(model, reason) for reason in REFUSAL_REASONS
        }
        self.resumed = {
            reason: parents["resumed_requests"].labels(model, reason) for reason in RESUME_REASONS
        }
        self.internal_errors: Counter = parents["internal_errors"].labels(model)
        self.prompt_tokens: Counter = parents["prompt_tokens"].labels(model)
        self.generation_tokens: Counter = parents["generation_tokens"].labels(model)
        self.gaps: _TallyHistogram = parents["inter_token_latency_seconds"].labels(model)
        self.histograms: dict[str, Histogram] = {
            name: parents[name].labels(model) for name in _BUCKETS
        }


class GatewayMetrics:
    """The metrics of one process; sessions report through a `RequestWatch`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._parents = {
            name: self._make(name) for name, spec in BY_NAME.items() if spec.source == "gateway"
        }
        self.active: Gauge = self._parents["active_requests"]
        self._parents["gateway_processes"].set(1)
        self._models: dict[str, _OfModel] = {}
        self._model = ""
        self._counts = [0] * (len(_GAPS_S) + 1)
        self._gaps_s = 0.0
        self._num_tokens = 0
        self._flush_at_s = 0.0

    def _make(self, name: str) -> Any:
        spec = BY_NAME[name]
        given = (spec.full_name, spec.text, spec.labels)
        if spec.kind is MetricKind.COUNTER:
            return Counter(*given, registry=self.registry)
        if spec.kind is MetricKind.GAUGE:
            return Gauge(*given, registry=self.registry, multiprocess_mode="livesum")
        return _TallyHistogram(*given, registry=self.registry, buckets=_BUCKETS[name])

    def of(self, model: str) -> _OfModel:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _OfModel(self._parents, model)
        return found

    # -- requests -----------------------------------------------------------------------------

    def refuse(self, model: str, error: OutriderError) -> None:
        """Count a request that was refused."""
        self.of(model).refused[refusal_of(error)].inc()

    def count_unauthorized(self, model: str, error: OutriderError) -> None:
        """Count an error of authentication or authorization; others are counted with their
        request."""
        if isinstance(error, UnauthenticatedError | ForbiddenError):
            self.refuse(model, error)

    def fail(self, model: str) -> None:
        """Count an internal error."""
        self.of(model).internal_errors.inc()

    def resume(self, model: str, reason: str, times: int = 1) -> None:
        """Count a resumed request, by one of `RESUME_REASONS`."""
        if times:
            self.of(model).resumed[reason].inc(times)

    # -- tokens -------------------------------------------------------------------------------

    def add_tokens(self, model: str, count: int, gap_s: float | None, now_s: float) -> None:
        """Tally new tokens of a sample, `gap_s` after the previous ones; None for the first."""
        if model != self._model:
            self.flush()
            self._model = model
        self._num_tokens += count
        if gap_s is not None:
            self._counts[bisect_left(_GAPS_S, gap_s / count)] += count
            self._gaps_s += gap_s
        if now_s >= self._flush_at_s:
            self._flush_at_s = now_s + FLUSH_EVERY_S
            self.flush()

    def flush(self) -> None:
        """Write the tallies to the metrics."""
        if counts_in_memory():
            self._parents["metrics_in_memory"].set(1)
        if not self._num_tokens:
            return
        of_model = self.of(self._model)
        of_model.generation_tokens.inc(self._num_tokens)
        self._num_tokens = 0
        if self._gaps_s or any(self._counts):
            of_model.gaps.take(self._counts, self._gaps_s)
            self._counts = [0] * len(self._counts)
            self._gaps_s = 0.0
