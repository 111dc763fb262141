"""Two replicas of the chart's pods, run: an upgrade to an image that does not exist, one to an
image that does, and a drained node cost no stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import helm_python
import pytest
from chart_tools import example_values, merged
from kill_load import LOAD, Addresses, Running, is_same
from pod_cluster import NEXT, PodCluster
from pods import skip_reason

from outrider.cluster import kube_rollout

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

SERVICE = "demo-outrider-gateway"
VALUES = merged(
    example_values("cpu-demo"),
    {
        "replicas": 2,
        "config": {"deterministic": True},
        "engine": {"drainSeconds": 10},
        "upgrade": {"handoverSeconds": 10},
    },
)
FEW = [LOAD[0], LOAD[2], LOAD[7]]  # greedy, with log-probabilities, over HTTP
NUM_TOKENS = 40
TOKENS_BEFORE = 4
LIMIT_S = 600.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[PodCluster]:
    reason = skip_reason()
    if reason is not None:
        pytest.skip(reason)
    with PodCluster(pace=0.1) as made:
        made.install(VALUES)
        made.wait_ready(LIMIT_S)
        yield made


@pytest.fixture(scope="module")
def where(cluster: PodCluster) -> Addresses:
    return Addresses(cluster.address(SERVICE, 50051), cluster.address(SERVICE, 8000))


@pytest.fixture(scope="module")
def undisturbed(where: Addresses) -> list[Any]:
    return Running(where, FEW, num_tokens=NUM_TOKENS).results()


def during(where: Addresses, undisturbed: list[Any], work: Callable[[], None]) -> None:
    """Do it while streams run, and others after them, until it is done."""
    load = Running(where, FEW, num_tokens=NUM_TOKENS)
    load.wait_tokens(TOKENS_BEFORE)
    work()
    assert is_same(load.results(), undisturbed)
    assert load.num_lost == 0
    after = Running(where, FEW, num_tokens=NUM_TOKENS)
    assert is_same(after.results(), undisturbed)
    assert after.num_lost == 0


def names(cluster: PodCluster) -> list[str]:
    return cluster.api.named("RayCluster")


@pytest.mark.parametrize("max_surge", [1, 0])
def test_an_image_that_does_not_exist_costs_no_stream(
    cluster: PodCluster,
    where: Addresses,
    undisturbed: list[Any],
    max_surge: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kube_rollout, "STUCK_S", 5.0)
    before = names(cluster)

    def upgrade() -> None:
        bad = {"image": {"tag": "no-such-tag"}, "upgrade": {"maxSurge": max_surge}}
        with pytest.raises(helm_python.HelmError):
            cluster.install(merged(VALUES, bad))

    during(where, undisturbed, upgrade)
    assert names(cluster) == before
    assert "ImagePullBackOff" in cluster.said[-1]
    cluster.wait_ready(LIMIT_S)


def test_an_image_that_exists_costs_no_stream(
    cluster: PodCluster, where: Addresses, undisturbed: list[Any]
) -> None:
    before = names(cluster)
    values = merged(VALUES, {"image": {"tag": NEXT}, "upgrade": {"maxSurge": 0}})
    during(where, undisturbed, lambda: cluster.install(values))
    assert len(names(cluster)) == 2 and not set(names(cluster)) & set(before)
    cluster.wait_ready(LIMIT_S)


def test_a_drained_node_costs_no_stream(
    cluster: PodCluster, where: Addresses, undisturbed: list[Any]
) -> None:
    target = cluster.pod("target")

    def drain() -> None:
        target.delete()
        cluster.wait(lambda: target.is_gone, LIMIT_S)

    during(where, undisturbed, drain)
    assert "leaves a host that is about to end" in "".join(
        each.log("controller") for each in cluster.of("controller")
    )
    cluster.wait_ready(LIMIT_S)
