"""The engines' counters as metrics, queried at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from outrider.gateway.metrics.names import BY_NAME, MetricKind
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaState
from outrider.links.gateway_messages import EngineStatus, ProcessState
from outrider.links.rank_messages import Role
from outrider.scheduler.types import STEP_TOKENS

_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Counts of a replica; only its restarts while it does not answer."""

    name: str
    status: EngineStatus | None
    restarts: int
    draft_restarts: int | None
    placement_s: float | None = None
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaNumbers:
    """How many replicas are configured, and how many take requests."""

    configured: int
    ready: int


def numbers_of(cluster: ClusterView) -> ReplicaNumbers:
    """As their controller knows them."""
    states = [view.state for view in cluster.replicas]
    configured = len(states) if cluster.num_configured is None else cluster.num_configured
    return ReplicaNumbers(configured, states.count(ReplicaState.SERVING.value))


def number_families(numbers: ReplicaNumbers) -> list[Metric]:
    return [
        _family("replicas_configured", ((), numbers.configured)),
        _family("replicas_ready", ((), numbers.ready)),
    ]


def replica_counts(
    statuses: Mapping[str, EngineStatus | None],
    cluster: ClusterView | None = None,
    num_losses: Mapping[str, int] = MappingProxyType({}),
) -> list[ReplicaCounts]:
    """The counts of replicas by name. `num_losses` stands in for restarts where no `cluster` counts
    them. Without any replica, one that is down is reported."""
    views = {} if cluster is None else {view.name: view for view in cluster.replicas}
    counts = []
    for name, status in (statuses or {"": None}).items():
        whole = views.get(name) or (None if views else cluster)
        restarts = num_losses.get(name, 0)
        draft_restarts = None if status is None else status.draft_losses
        if whole is not None:
            restarts, draft_restarts = whole.restarts, whole.draft_restarts
        count = ReplicaCounts(name, status, restarts, draft_restarts)
        if (view := views.get(name)) is not None:
            count = replace(count, placement_s=view.placement_s, start_s=view.start_s)
        counts.append(count)
    return counts


def engine_families(model: str, replicas: Iterable[ReplicaCounts]) -> list[Metric]:
    """All series of all replicas, by metric."""
    families: dict[str, Metric] = {}
    for replica in replicas:
        for family in _of_replica(_Labels(model, replica.name), replica):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples.extend(family.samples)
    return list(families.values())


class _Labels(NamedTuple):
    model: str
    replica: str


def _of_replica(labels: _Labels, replica: ReplicaCounts) -> Iterator[Metric]:
    status = replica.status
    yield _family("engine_up", ((labels.replica,), float(status is not None)))
    yield _family("engine_restarts", (labels, replica.restarts))
    if replica.draft_restarts is not None:
        yield _family("draft_restarts", (labels, replica.draft_restarts))
    if replica.placement_s is not None:
        yield _family("replica_placement_seconds", ((labels.replica,), replica.placement_s))
    if replica.start_s is not None:
        yield _family("replica_start_seconds", ((labels.replica,), replica.start_s))
    if status is not None:
        yield from _roles(labels, status)
        yield from _load(labels, status)
        yield from _speculation(labels, status)


def _roles(labels: _Labels, status: EngineStatus) -> Iterator[Metric]:
    up: dict[str, int] = {}
    for rank in status.ranks:
        up[rank.role] = up.get(rank.role, 0) + (rank.state is ProcessState.READY)
    for model in status.models:
        up[model.role] = up.get(model.role, 0) + 1
    yield _family("ranks_up", *(((*labels, role), count) for role, count in up.items()))
    if Role.DRAFT in up:
        draft_ranks = [each for each in status.ranks if each.role == Role.DRAFT]
        yield _family("draft_up", (labels, float(up[Role.DRAFT] >= max(len(draft_ranks), 1))))


def _load(labels: _Labels, status: EngineStatus) -> Iterator[Metric]:
    counters = status.counters
    usage = status.kv_blocks_used / status.kv_blocks if status.kv_blocks else 0.0
    for name, value in (
        ("num_requests_running", status.running),
        ("num_requests_waiting", status.waiting),
        ("kv_cache_usage_perc", usage),
        ("prefix_cache_queries", counters.prompt_tokens),
        ("prefix_cache_hits", counters.cached_tokens),
        ("num_preemptions", status.preemptions),
        ("num_fairness_preemptions", counters.fairness_preemptions),
        ("num_displaced", counters.displaced),
        ("engine_steps", status.steps),
        ("draft_time_seconds", counters.draft_s),
        ("verify_time_seconds", counters.verify_s),
        ("transfer_time_seconds", counters.transfer_s),
        ("draft_ahead_rounds", counters.ahead.rounds),
        ("draft_ahead_hits", counters.ahead.hits),
        ("draft_ahead_tokens", counters.ahead.drafted),
        ("draft_ahead_used_tokens", counters.ahead.used),
        ("wait_time_seconds", counters.wait_s),
    ):
        yield _family(name, (labels, value))
    if len(counters.steps_by_tokens) == len(STEP_TOKENS) + 1:  # else the engine is an older one
        below = list(accumulate(counters.steps_by_tokens))
        yield _histogram("iteration_tokens", labels, STEP_TOKENS, below, counters.step_tokens)
    if status.speculation is not None:
        yield _family("arrivals_per_second", (labels, status.speculation.arrivals_per_s))


def _speculation(labels: _Labels, status: EngineStatus) -> Iterator[Metric]:
    counters = status.counters
    for name, value in (
        ("spec_decode_num_drafts", sum(counters.rounds_by_drafted[1:])),
        ("spec_decode_num_draft_tokens", status.drafted_tokens),
        ("spec_decode_num_verified_tokens", counters.verified_tokens),
        ("spec_decode_num_accepted_tokens", status.accepted_tokens),
    ):
        yield _family(name, (labels, value))
    yield _family(
        "spec_decode_num_accepted_tokens_per_pos",
        *(
            ((*labels, str(position)), count)
            for position, count in enumerate(_at_least(counters.rounds_by_accepted))
        ),
    )
    yield _depths(labels, counters.rounds_by_drafted)
    proposers = counters.proposers
    yield _family(
        "proposer_checked_tokens",
        *(((*labels, each.name), each.checked_tokens) for each in proposers),
    )
    yield _family(
        "proposer_agreed_tokens",
        *(((*labels, each.name), each.agreed_tokens) for each in proposers),
    )
    gain = None if status.speculation is None else status.speculation.gain
    if gain is not None:
        yield _family("speculation_gain", (labels, gain))


def _at_least(rounds: Sequence[int]) -> list[int]:
    """Rounds with one or more, two or more, ... tokens: the count of each position."""
    return list(accumulate(reversed(rounds[1:])))[::-1]


def _histogram(
    name: str, labels: _Labels, bounds: Sequence[int], below: Sequence[int], total: float
) -> Metric:
    """`below` has the cumulative count of each bound, then the total count."""
    family = _family(name)
    named = labels._asdict()
    for bound, count in zip((*map(float, bounds), "+Inf"), below, strict=True):
        family.add_sample(f"{family.name}_bucket", named | {"le": str(bound)}, count)
    family.add_sample(f"{family.name}_count", named, below[-1])
    family.add_sample(f"{family.name}_sum", named, total)
    return family


def _depths(labels: _Labels, rounds: Sequence[int]) -> Metric:
    at_most = [0, *accumulate(rounds)]
    below = [at_most[min(bound + 1, len(rounds))] for bound in _DEPTHS]
    total = sum(depth * count for depth, count in enumerate(rounds))
    return _histogram("draft_depth", labels, _DEPTHS, [*below, at_most[-1]], total)


def _family(name: str, *values: tuple[tuple[str, ...], float]) -> Metric:
    spec = BY_NAME[name]
    family = Metric(spec.full_name, spec.text, spec.kind.value)
    for labels, value in values:
        found = dict(zip(spec.labels, labels, strict=True))
        family.add_sample(spec.sample_name, found, value)
    assert spec.kind is not MetricKind.HISTOGRAM or not values
    return family
