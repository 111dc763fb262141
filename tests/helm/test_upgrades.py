"""What an upgrade replaces: a RayCluster's pods are never changed, so its name follows its spec."""

from __future__ import annotations

from typing import Any

import pytest
from chart_tools import Rendered, example, render


def names(rendered: Rendered) -> list[str]:
    return [each["metadata"]["name"] for each in rendered.all("RayCluster")]


@pytest.mark.parametrize(
    "changed",
    [
        {"image": {"tag": "0.2.0"}},
        {"draft": {"numSpeculativeTokens": 3}},
        {"config": {"cache": {"block_size": 32}}},
        {"target": {"nodeSelector": {"a": "b"}}},
        {"upgrade": {"handoverSeconds": 10}},
    ],
    ids=str,
)
def test_another_spec_or_configuration_is_another_raycluster(changed: dict[str, Any]) -> None:
    assert names(render(changed)) != names(render())


@pytest.mark.parametrize(
    "changed",
    [
        {"gateway": {"replicas": 7}},
        {"replicas": 3},
        {"auth": {"keysSecret": "keys"}},
        {"metrics": {"rules": {"enabled": True}}},
        {"service": {"type": "LoadBalancer"}},
    ],
    ids=str,
)
def test_what_is_no_matter_of_engines_replaces_none(changed: dict[str, Any]) -> None:
    assert names(render(changed))[0] == names(render())[0]


def test_a_new_version_of_the_chart_alone_replaces_no_engine() -> None:
    """Pods have no label that changes with it."""
    for pod in render().pods:
        if pod.owner.startswith("RayCluster"):
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & pod.labels.keys()


@pytest.mark.parametrize("partition", range(4))
def test_replicas_below_the_partition_stay_as_they_were(partition: int) -> None:
    previous = {"image": {"tag": "0.1.0"}, "draft": {"method": "ngram"}}
    old = names(render(previous, replicas=3))
    new = names(render(image={"tag": "0.2.0"}, replicas=3))
    assert not set(old) & set(new)
    upgrade = {"partition": partition, "previous": previous}
    found = names(render(image={"tag": "0.2.0"}, replicas=3, upgrade=upgrade))
    assert found == old[:partition] + new[partition:]


def test_an_example_in_the_middle_of_an_upgrade_runs_both() -> None:
    rendered = example("multi-replica")
    drafts = [rendered.config(name)["draft"]["model"] for name in names(rendered)]
    assert drafts == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]
    notes = rendered.texts["outrider/templates/NOTES.txt"]
    assert "replicas below 2 run with upgrade.previous" in notes


def test_a_replica_that_was_replaced_serves_on_before_it_drains() -> None:
    pod = render(upgrade={"handoverSeconds": 77}).pod("controller")
    lifecycle = pod.container("controller")["lifecycle"]
    assert lifecycle == {"preStop": {"sleep": {"seconds": 77}}}
    none = render(upgrade={"handoverSeconds": 0}).pod("controller").container("controller")
    assert "lifecycle" not in none
