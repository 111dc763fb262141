"""Pods of our own follow objects as controllers of Kubernetes have them: Deployments roll, names
lead to pods, and drained nodes are left as budgets allow."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import pytest
from kubelet import Pod
from pod_cluster import PodCluster, default_images
from pods import skip_reason

LIMIT_S = 60.0
LABELS = {"app.kubernetes.io/component": "web"}
IMAGE = next(iter(default_images()))
NAMESPACE = "llm"
SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"


@pytest.fixture
def cluster() -> Iterator[PodCluster]:
    reason = skip_reason()
    if reason is not None:
        pytest.skip(reason)
    with PodCluster(pace=0.02, is_warm=False) as made:
        put(made, "Deployment", "web", deployment())
        for name, address in (("web", "10.0.0.1"), ("all", "None")):
            put(made, "Service", name, {"clusterIP": address, "selector": LABELS})
        made.wait_ready(LIMIT_S)
        yield made


def put(cluster: PodCluster, kind: str, name: str, spec: dict[str, Any]) -> None:
    metadata = {"name": name, "namespace": NAMESPACE, "resourceVersion": "1"}
    cluster.api.objects[kind, name] = {"kind": kind, "metadata": metadata, "spec": spec}


def deployment(image: str = IMAGE, replicas: int = 2) -> dict[str, Any]:
    container = {
        "name": "web",
        "image": image,
        "command": ["python3", "-Sc", SERVER],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "timeoutSeconds": 10},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    return {
        "replicas": replicas,
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": LABELS}, "spec": spec},
    }


def addresses_of(pod: Pod, name: str) -> set[str]:
    """What a name leads to inside a pod."""
    running = pod.containers[0].running
    assert running is not None
    said = running.execute(["getent", "ahostsv4", name], LIMIT_S)[1]
    return {line.split()[0] for line in said.splitlines()}


def is_answered(cluster: PodCluster) -> bool:
    connection = http.client.HTTPConnection(cluster.address("web", 8000), timeout=LIMIT_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def test_names_lead_to_ready_pods(cluster: PodCluster) -> None:
    first, second = cluster.of("web")
    assert addresses_of(first, f"all.{NAMESPACE}.svc") == {first.ip, second.ip}
    assert len(addresses_of(first, f"web.{NAMESPACE}.svc.cluster.local")) == 1
    assert is_answered(cluster)
    put(cluster, "Deployment", "web", deployment(replicas=1))
    cluster.wait_ready(LIMIT_S)
    (left,) = cluster.of("web")
    assert addresses_of(left, "all") == {left.ip}
    assert is_answered(cluster)


def test_a_deployment_rolls_and_one_of_a_bad_image_does_not(cluster: PodCluster) -> None:
    before = cluster.of("web")
    put(cluster, "Deployment", "web", deployment("registry.example/missing:1"))
    cluster.wait(lambda: len(cluster.of("web")) == 3, LIMIT_S)
    bad = cluster.of("web")[-1]
    cluster.wait(lambda: bad.containers[0].reason == "ImagePullBackOff", LIMIT_S)
    assert all(each.is_ready for each in before)
    assert bad.to_object()["status"]["containerStatuses"][0]["state"]["waiting"]
    cluster.images["registry.example/missing:1"] = default_images()[IMAGE]
    cluster.wait(lambda: all(each.is_gone for each in before), LIMIT_S)
    cluster.wait_ready(LIMIT_S)
    assert is_answered(cluster)


def test_a_drained_node_is_left_one_pod_at_a_time(cluster: PodCluster) -> None:
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": LABELS}}
    put(cluster, "PodDisruptionBudget", "web", budget)
    for node in cluster.nodes:
        cluster.uncordon(node)
    least = []

    def is_left() -> bool:
        least.append(sum(each.is_ready for each in cluster.of("web")))
        return all(each.host == "node-b" for each in cluster.of("web"))

    cluster.drain("node-a")
    cluster.wait(is_left, LIMIT_S)
    cluster.wait_ready(LIMIT_S)
    assert min(least) >= 1
    assert {each.host for each in cluster.of("web")} == {"node-b"}


def test_a_suspended_raycluster_has_no_pods(cluster: PodCluster) -> None:
    container = {"name": "ray", "image": "registry.example/missing:2"}
    template = {"metadata": {"labels": {}}, "spec": {"containers": [container]}}
    group = {"template": template, "rayStartParams": {"num-cpus": "1"}}
    spec: dict[str, Any] = {"headGroupSpec": group}
    spec["workerGroupSpecs"] = [{**group, "groupName": "workers", "replicas": 2}]
    put(cluster, "RayCluster", "ray", spec)
    own = ("RayCluster", "ray")

    def count() -> int:
        return sum(each.owner == own and not each.is_gone for each in cluster.pods)

    cluster.wait(lambda: count() == 3, LIMIT_S)
    put(cluster, "RayCluster", "ray", spec | {"suspend": True})
    cluster.wait(lambda: count() == 0, LIMIT_S)
