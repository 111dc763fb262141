"""The chart's pods, run: what Helm makes of the example for CPUs comes up in namespaces with
KubeRay's commands and probes, answers, and loses nothing when what computes is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from chart_tools import example_values, merged
from kill_load import LOAD, Addresses, Newcomer, Running, is_same
from pod_cluster import ENGINE, RANK, PodCluster
from pods import skip_reason

from outrider.client import Client

pytestmark = pytest.mark.model

SERVICE = "demo-outrider-gateway"
VALUES = merged(example_values("cpu-demo"), {"config": {"deterministic": True}})
FEW = [LOAD[0], LOAD[2], LOAD[7]]  # greedy, with log-probabilities, over HTTP
NUM_TOKENS = 40
TOKENS_BEFORE = 4
ANSWERED_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[PodCluster]:
    reason = skip_reason()
    if reason is not None:
        pytest.skip(reason)
    with PodCluster(pace=0.2) as made:
        made.install(VALUES)
        made.wait_ready()
        yield made


@pytest.fixture(scope="module")
def where(cluster: PodCluster) -> Addresses:
    return Addresses(cluster.address(SERVICE, 50051), cluster.address(SERVICE, 8000))


@pytest.fixture(scope="module")
def undisturbed(where: Addresses) -> list[Any]:
    return Running(where, FEW, num_tokens=NUM_TOKENS).results()


def test_containers_run_as_the_chart_says(cluster: PodCluster) -> None:
    """As their user, without capabilities, on a root that cannot be written to."""
    container = cluster.pod("target").container("target")
    assert container.running is not None
    status, said = container.running.execute(
        ["bash", "-c", "id -u; id -g; grep CapBnd /proc/self/status; touch /home/outrider/x"], 30
    )
    assert status == 1
    assert said.split()[:4] == ["10001", "10001", "CapBnd:", "0000000000000000"]
    assert "Read-only file system" in said


def test_it_answers_over_http_and_grpc(undisturbed: list[Any], where: Addresses) -> None:
    with Client(where.grpc_address) as client:
        client.wait_ready(ANSWERED_S)
        done = client.generate("The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in done.text
    assert len(undisturbed) == len(FEW)


@pytest.mark.parametrize("process", [RANK, ENGINE], ids=["rank", "engine"])
def test_a_killed_process_costs_no_stream(
    cluster: PodCluster,
    where: Addresses,
    undisturbed: list[Any],
    process: str,
) -> None:
    cluster.wait_ready()  # a gateway that is not ready yet after the case before has no endpoint
    load = Running(where, FEW, num_tokens=NUM_TOKENS)
    load.wait_tokens(TOKENS_BEFORE)
    cluster.kill(cluster.pod("target"), process)
    killed_s = time.monotonic()
    newcomer = Newcomer(where)
    assert is_same(load.results(), undisturbed)
    assert load.num_lost == 0
    newcomer.join()
    assert newcomer.accepted_s > killed_s
