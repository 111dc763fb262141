"""What an upgrade replaces: a RayCluster's pods are never changed, so its name follows its spec."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from chart_tools import Rendered, example, render

from outrider.cluster.deploy.kube_rollout import END_S, RolloutPlan


def names(rendered: Rendered) -> list[str]:
    return [each["metadata"]["name"] for each in rendered.all("RayCluster")]


@pytest.mark.parametrize(
    "changed",
    [
        {"image": {"tag": "0.2.0"}},
        {"draft": {"numSpeculativeTokens": 3}},
        {"config": {"cache": {"block_size": 32}}},
        {"target": {"nodeSelector": {"a": "b"}}},
        {"upgrade": {"gate": False}},
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
        {"upgrade": {"maxSurge": 0, "handoverSeconds": 10}},
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


def test_without_the_gate_a_replica_that_was_replaced_serves_on_before_it_drains() -> None:
    def controller(**upgrade: Any) -> dict[str, Any]:
        return render(upgrade=upgrade).pod("controller").container("controller")

    lifecycle = controller(gate=False, handoverSeconds=77)["lifecycle"]
    assert lifecycle == {"preStop": {"sleep": {"seconds": 77}}}
    assert "lifecycle" not in controller(gate=False, handoverSeconds=0)
    assert "lifecycle" not in controller(handoverSeconds=77)  # its successor serves already


# -- the gate -----------------------------------------------------------------------------------


def plan(rendered: Rendered) -> RolloutPlan:
    (found,) = (
        each
        for each in rendered.of("upgrade.yaml")
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "demo-outrider-upgrade"
    )
    settings, *items = yaml.safe_load_all(found["data"]["replicas.yaml"])
    return RolloutPlan.of(settings, items)


def test_the_job_makes_exactly_what_helm_would() -> None:
    rendered = render(replicas=3, upgrade={"maxSurge": 0, "handoverSeconds": 7})
    found = plan(rendered)
    assert [each.cluster for each in found.replicas] == rendered.all("RayCluster")
    assert [each.index for each in found.replicas] == [0, 1, 2]
    for each in found.replicas:
        assert each.config_map == rendered.one("ConfigMap", each.name)
    assert (found.max_surge, found.settle_s) == (0, 7.0)
    probes = rendered.pod("controller").container("controller")["startupProbe"]
    assert found.start_s >= probes["failureThreshold"] * probes["periodSeconds"]
    assert found.stop_s == rendered.pod("target").spec["terminationGracePeriodSeconds"]
    for pod in rendered.pods:
        if pod.owner.startswith("RayCluster"):
            assert found.labels.items() <= pod.labels.items()


def test_the_job_runs_before_anything_is_changed_and_its_rights_come_first() -> None:
    weights = {}
    for each in render().of("upgrade.yaml"):
        notes = each["metadata"]["annotations"]
        assert notes["helm.sh/hook"] == "pre-upgrade,pre-rollback"  # an install needs none of it
        assert notes["helm.sh/hook-delete-policy"] == "before-hook-creation"
        weights[each["kind"]] = int(notes["helm.sh/hook-weight"])
    others = {kind: weight for kind, weight in weights.items() if kind != "Job"}
    assert set(others) == {"ServiceAccount", "Role", "RoleBinding", "ConfigMap"}
    assert max(others.values()) < weights["Job"]


def test_the_job_may_do_no_more_than_it_does() -> None:
    rules = render().one("Role")["rules"]
    granted = {r: set(each["verbs"]) for each in rules for r in each["resources"]}
    assert granted["rayclusters"] == {"get", "list", "create", "patch", "delete"}
    assert granted["configmaps"] == {"create", "delete"} and granted["pods"] == {"get", "list"}
    assert len(granted) == 3


def test_the_job_has_time_for_the_way_there_and_back() -> None:
    rendered = render(replicas=3)
    found = plan(rendered)
    (job,) = (each for each in rendered.of("upgrade.yaml") if each["kind"] == "Job")
    once = found.start_s + found.stop_s + found.settle_s + END_S
    assert job["spec"]["activeDeadlineSeconds"] > 2 * 3 * once
    assert job["spec"]["template"]["spec"]["containers"][0]["image"].startswith(
        "registry.example/outrider-gateway"
    )


@pytest.mark.parametrize("values", [{"mode": "plain"}, {"replicas": 0}], ids=str)
def test_where_there_are_no_rayclusters_there_is_no_job(values: dict[str, Any]) -> None:
    assert render(values).of("upgrade.yaml") == []
