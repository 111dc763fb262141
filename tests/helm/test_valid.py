"""Every object is one that Kubernetes and the operators know: no field is wrong or unknown."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from chart_tools import EXAMPLES, example, render
from crd_tools import known_kinds, problems

# The least that Chart.yaml takes, and the two newest.
MINORS = ("1.30", "1.36", "1.37")
# Options that no example has.
OPTIONS: dict[str, dict[str, Any]] = {
    "service monitor": {"metrics": {"serviceMonitor": {"enabled": True}}},
    "plain with everything": {
        "mode": "plain",
        "target": {"device": "cpu"},
        "metrics": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}},
        "networkPolicy": {"enabled": True},
        "tls": {"enabled": True, "existingSecret": "tls", "clientCASecret": "ca"},
        "auth": {"keysSecret": "keys"},
    },
    "hosts and extras": {
        "engine": {
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
        },
        "gateway": {
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
        },
        "hub": {"token": "secret", "endpoint": "https://hub.example", "offline": True},
        "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"},
        "head": {"tolerations": [{"operator": "Exists"}], "priorityClassName": "high"},
    },
}


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once() -> Iterator[None]:
    """They are megabytes, and are read anew for every object otherwise."""
    utils = kubernetes_validate.utils
    before = utils.schema_contents
    utils.schema_contents = functools.cache(before)
    yield
    utils.schema_contents = before


@functools.cache
def objects(name: str) -> list[dict[str, Any]]:
    return (render(OPTIONS[name]) if name in OPTIONS else example(name)).objects


def is_own(item: dict[str, Any]) -> bool:
    """Whether Kubernetes itself knows its kind."""
    group, slash, _ = item["apiVersion"].partition("/")
    return not slash or "." not in group or group.endswith("k8s.io") and "gateway" not in group


@pytest.mark.parametrize("name", [*EXAMPLES, *OPTIONS])
@pytest.mark.parametrize("minor", MINORS)
def test_kubernetes_takes_every_object(name: str, minor: str) -> None:
    checked = [item for item in objects(name) if is_own(item)]
    for item in checked:
        kubernetes_validate.validate(item, minor, strict=True)
    assert {"Service", "ConfigMap", "ServiceAccount"} <= {item["kind"] for item in checked}


@pytest.mark.parametrize("minor", MINORS)
def test_kubernetes_takes_the_pods_of_a_raycluster(minor: str) -> None:
    for pod in example("production").pods:
        item = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
        kubernetes_validate.validate(item, minor, strict=True)


@pytest.mark.parametrize("name", [*EXAMPLES, *OPTIONS])
def test_operators_take_every_object(name: str) -> None:
    for item in objects(name):
        if (item["apiVersion"], item["kind"]) in known_kinds():
            assert problems(item) == []


def test_every_kind_of_an_operator_is_checked() -> None:
    """cert-manager's alone is not: there is no definition of it here."""
    kinds = {
        (item["apiVersion"], item["kind"])
        for name in [*EXAMPLES, *OPTIONS]
        for item in objects(name)
        if not is_own(item)
    }
    assert kinds - {("cert-manager.io/v1", "Certificate")} == known_kinds()


def test_a_field_that_an_operator_does_not_know_is_found() -> None:
    cluster = copy.deepcopy(render().one("RayCluster"))
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["comand"] = ["ray"]
    (problem,) = problems(cluster)
    assert "comand" in problem
