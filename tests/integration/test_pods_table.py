"""Two replicas of the chart in pods, under load: what each loss costs, as a page of the
documentation where `OUTRIDER_POD_TABLE` names it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import helm_python
import pytest
from chart_tools import example_values, merged
from kill_load import LIMIT_S, LOAD, Addresses, Running, is_same
from kill_table import Page
from pod_cluster import CONTROLLER, ENGINE, GCS, NEXT, RANK, PodCluster
from pods import skip_reason

from outrider import OutriderError
from outrider.client import Client

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

SERVICE = "demo-outrider-gateway"
REPLICAS = 2
VALUES = merged(
    example_values("cpu-demo"),
    {
        "replicas": REPLICAS,
        "config": {"deterministic": True, "num_threads": 1, "cache": {"kv_cache_gb": 0.2}},
        "engine": {"drainSeconds": 10},
        "upgrade": {"handoverSeconds": 10},
    },
)
FEW = [LOAD[0], LOAD[1], LOAD[2], LOAD[7]]  # the last over HTTP
NUM_TOKENS = 120
TOKENS_BEFORE = 6
WHOLE_S = 600.0
PAUSE_S = 0.5
ANSWERED_S = 60.0
BAD = "missing"  # tag of an image that is not there

Loss = Callable[[PodCluster], None]

PAGE = Page(
    text=f"""# What losses cost a release on Kubernetes

Each line is a case of [test_pods_table.py](../../tests/integration/test_pods_table.py). Two
replicas of the chart run in pods made of namespaces, with KubeRay's commands and probes
([on Kubernetes](../helm.md#pods-without-kubelet)). Four streams (gRPC and HTTP) have a few tokens
each when it happens; they are read to the end and compared with an undisturbed run. New requests
for one token are sent meanwhile, one after the other, until all is whole.

- **streams lost**: those that ended with an error or with another text.
- **longest pause** between two pieces of any stream, in seconds, as are all times.
- **accepted after**: the longest time in which every new request was rejected; a dash where they
  were rejected to the end.
- **slowest new token**: of new requests that were accepted.
- **whole after**: until all pods were ready and the gateway had both replicas; a dash where that
  was not within {WHOLE_S:g} s.

Measured on {{machine}}, with the bundled pair; probes and restart delays run five times as fast as
in Kubernetes. Made by

```sh
{{command}}
```

{{table}}
""",
    headings=(
        "replicas",
        "what happens",
        "streams lost",
        "longest pause",
        "accepted after",
        "slowest new token",
        "whole after",
    ),
    command="OUTRIDER_POD_TABLE=docs/results/pods.md "
    "python -m pytest tests/integration/test_pods_table.py",
)


class Newcomers:
    """New requests one after the other, until `stop`."""

    def __init__(self, where: Addresses) -> None:
        self.rejected_s = self.slowest_s = 0.0
        self.is_rejected = False  # at the end
        self._where = where
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        since_s: float | None = None
        while not self._is_over.wait(PAUSE_S):
            sent_s = time.monotonic()
            try:
                with Client(self._where.grpc_address, resume=False) as client:
                    client.generate("hello", max_tokens=1, ignore_eos=True, timeout_s=ANSWERED_S)
            except OutriderError:
                since_s = sent_s if since_s is None else since_s
            else:
                self.rejected_s = max(self.rejected_s, sent_s - (since_s or sent_s))
                self.slowest_s = max(self.slowest_s, time.monotonic() - sent_s)
                since_s = None
        self.is_rejected = since_s is not None


def killed(component: str, process: str) -> Loss:
    def lose(cluster: PodCluster) -> None:
        cluster.kill(cluster.pod(component), process)

    return lose


def deleted(component: str) -> Loss:
    return lambda cluster: cluster.pod(component).delete()


def drained(cluster: PodCluster) -> None:
    cluster.drain(cluster.pod("target").host)


def upgraded(tag: str) -> Loss:
    """A gate may refuse it, which Helm says."""

    def lose(cluster: PodCluster) -> None:
        with suppress(helm_python.HelmError):
            cluster.install(merged(VALUES, {"image": {"tag": tag}}), WHOLE_S)

    return lose


LOSSES: dict[str, Loss] = {
    "rank killed": killed("target", RANK),
    "engine killed": killed("target", ENGINE),
    "controller killed": killed("controller", CONTROLLER),
    "gcs_server killed": killed("controller", GCS),
    "worker pod deleted": deleted("target"),
    "head pod deleted": deleted("controller"),
    "node drained": drained,
    "upgrade to another image": upgraded(NEXT),
    "upgrade to an image that is not there": upgraded(BAD),
}


def note(*row: object) -> None:
    path = os.environ.get("OUTRIDER_POD_TABLE")
    if path:
        PAGE.write(Path(path), [row])


@pytest.fixture(scope="module")
def shared() -> Iterator[list[PodCluster]]:
    """The cluster of the cases, until one of them leaves it broken."""
    made: list[PodCluster] = []
    yield made
    for each in made:
        each.__exit__()


@pytest.fixture
def cluster(shared: list[PodCluster]) -> PodCluster:
    reason = skip_reason()
    if reason is not None:
        pytest.skip(reason)
    if not shared:
        shared.append(PodCluster(pace=0.2).__enter__())
        shared[0].install(VALUES)
        wait_whole(shared[0], 2 * WHOLE_S)
    return shared[0]


def addresses(cluster: PodCluster) -> Addresses:
    return Addresses(cluster.address(SERVICE, 50051), cluster.address(SERVICE, 8000))


def wait_whole(cluster: PodCluster, limit_s: float = WHOLE_S) -> None:
    """Until all pods are ready and the gateway has all replicas."""
    cluster.wait(lambda: cluster.is_whole() and num_replicas(cluster) == REPLICAS, limit_s)


def num_replicas(cluster: PodCluster) -> int:
    """That gateways send requests to."""
    try:
        with Client(addresses(cluster).grpc_address, resume=False) as client:
            return sum(each.state == "serving" for each in client.status().replicas)
    except OutriderError:
        return 0


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_costs(
    name: str,
    cluster: PodCluster,
    shared: list[PodCluster],
    expected: dict[str, Any],
) -> None:
    where = addresses(cluster)
    if not expected:
        expected["results"] = Running(where, FEW, num_tokens=NUM_TOKENS).results()
    load = Running(where, FEW, num_tokens=NUM_TOKENS)
    load.wait_tokens(TOKENS_BEFORE)
    begin_s = time.monotonic()
    newcomers = Newcomers(where)
    whole_s = None
    try:
        LOSSES[name](cluster)
        for each in load.readers:
            each.join()
        wait_whole(cluster, max(WHOLE_S - (time.monotonic() - begin_s), 1.0))
        whole_s = time.monotonic() - begin_s
    finally:
        newcomers.stop()
        for node in list(cluster.cordoned):
            cluster.uncordon(node)
        if whole_s is None:  # the next case has another cluster
            print(cluster.report())
            shared.remove(cluster)
            cluster.__exit__()
        pairs = zip(load.readers, expected["results"], strict=True)
        num_lost = sum(not is_same(each.result, whole) for each, whole in pairs)
        accepted_s = None if newcomers.is_rejected else newcomers.rejected_s
        pause_s, slowest_s = load.longest_pause_s(), newcomers.slowest_s
        note(REPLICAS, name, num_lost, pause_s, accepted_s, slowest_s, whole_s)
    assert num_lost == 0, load.errors
