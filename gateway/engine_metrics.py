"""An engine's own counts as metrics: asked for when somebody looks, never kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import Metric

from outrider.gateway.metric_names import BY_NAME, Kind
from outrider.links.cluster_view import ClusterView
from outrider.links.gateway_messages import EngineStatus, ProcessState
from outrider.links.rank_messages import Role

_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


def engine_families(
    model: str,
    status: EngineStatus | None,
    cluster: ClusterView | None = None,
    num_losses: int = 0,
) -> Iterator[Metric]:
    """Without a `status` no more than that, and what others know of restarts: `num_losses` is how
    often the engine was lost, for where no `cluster` can tell how often it was started anew."""
    yield _family("engine_up", ((), float(status is not None)))
    restarts = num_losses if cluster is None else cluster.restarts
    yield _family("engine_restarts", ((model,), restarts))
    losses = 0 if status is None else status.draft_losses
    if cluster is not None or status is not None:
        draft_restarts = losses if cluster is None else cluster.draft_restarts
        yield _family("draft_restarts", ((model,), draft_restarts))
    if status is not None:
        yield from _roles(model, status)
        yield from _load(model, status)
        yield from _speculation(model, status)


def _roles(model: str, status: EngineStatus) -> Iterator[Metric]:
    up: dict[str, int] = {}
    for rank in status.ranks:
        up[rank.role] = up.get(rank.role, 0) + (rank.state is ProcessState.READY)
    for held in status.models:
        up[held.role] = up.get(held.role, 0) + 1
    yield _family("ranks_up", *(((model, role), count) for role, count in up.items()))
    if Role.DRAFT in up:
        draft_ranks = [each for each in status.ranks if each.role == Role.DRAFT]
        yield _family("draft_up", ((model,), float(up[Role.DRAFT] >= max(len(draft_ranks), 1))))


def _load(model: str, status: EngineStatus) -> Iterator[Metric]:
    counters = status.counters
    usage = status.kv_blocks_used / status.kv_blocks if status.kv_blocks else 0.0
    for name, value in (
        ("num_requests_running", status.running),
        ("num_requests_waiting", status.waiting),
        ("kv_cache_usage_perc", usage),
        ("prefix_cache_queries", counters.prompt_tokens),
        ("prefix_cache_hits", counters.cached_tokens),
        ("num_preemptions", status.preemptions),
        ("engine_steps", status.steps),
        ("draft_time_seconds", counters.draft_s),
        ("verify_time_seconds", counters.verify_s),
        ("transfer_time_seconds", counters.transfer_s),
        ("wait_time_seconds", counters.wait_s),
    ):
        yield _family(name, ((model,), value))


def _speculation(model: str, status: EngineStatus) -> Iterator[Metric]:
    counters = status.counters
    for name, value in (
        ("spec_decode_num_drafts", sum(counters.rounds_by_drafted[1:])),
        ("spec_decode_num_draft_tokens", status.drafted_tokens),
        ("spec_decode_num_verified_tokens", counters.verified_tokens),
        ("spec_decode_num_accepted_tokens", status.accepted_tokens),
    ):
        yield _family(name, ((model,), value))
    yield _family(
        "spec_decode_num_accepted_tokens_per_pos",
        *(
            ((model, str(position)), count)
            for position, count in enumerate(_at_least(counters.rounds_by_accepted))
        ),
    )
    yield _depths(model, counters.rounds_by_drafted)
    proposers = counters.proposers
    yield _family(
        "proposer_checked_tokens",
        *(((model, each.name), each.checked_tokens) for each in proposers),
    )
    yield _family(
        "proposer_agreed_tokens",
        *(((model, each.name), each.agreed_tokens) for each in proposers),
    )
    gain = None if status.speculation is None else status.speculation.gain
    if gain is not None:
        yield _family("speculation_gain", ((model,), gain))


def _at_least(rounds: Sequence[int]) -> list[int]:
    """Rounds that had one or more, two or more, ...: that is how often each place was taken."""
    return list(accumulate(reversed(rounds[1:])))[::-1]


def _depths(model: str, rounds: Sequence[int]) -> Metric:
    family = _family("draft_depth")
    below = [0, *accumulate(rounds)]
    for bound in _DEPTHS:
        labels = {"model": model, "le": str(float(bound))}
        family.add_sample(f"{family.name}_bucket", labels, below[min(bound + 1, len(rounds))])
    family.add_sample(f"{family.name}_bucket", {"model": model, "le": "+Inf"}, below[-1])
    family.add_sample(f"{family.name}_count", {"model": model}, below[-1])
    total = sum(depth * count for depth, count in enumerate(rounds))
    family.add_sample(f"{family.name}_sum", {"model": model}, total)
    return family


def _family(name: str, *values: tuple[tuple[str, ...], float]) -> Metric:
    described = BY_NAME[name]
    family = Metric(described.full_name, described.text, described.kind.value)
    for labels, value in values:
        found = dict(zip(described.labels, labels, strict=True))
        family.add_sample(described.sample_name, found, value)
    assert described.kind is not Kind.HISTOGRAM or not values
    return family
