"""Releases as Helm makes them: what an install draws is kept, and an upgrade's Job replaces engines
one at a time. The API server is a stand-in (tests/kube_api.py) with pods that are never run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
from chart_tools import BASE, CHART, NAMESPACE, RELEASE, merged
from kube_api import KubeApi, run_upgrade, running_api

from outrider.cluster.deploy import kube_rollout

pytestmark = pytest.mark.thorough

LIMIT_S = 60


class Release:
    """One that is installed, in a cluster of its own."""

    def __init__(self, api: KubeApi, url: str, config: helm_python.Config) -> None:
        self.api = api
        self.said: list[str] = []  # by the last Job
        self._url = url
        self._config = config
        api.run_job = self._run_job
        self._config.install(CHART, RELEASE, merged(BASE, {"replicas": 2}), timeout=LIMIT_S)

    def _run_job(self, job: dict[str, Any]) -> bool:
        self.said = []
        return run_upgrade(self.api, self._url, job, self.said, settle_s=0.0)

    def upgrade(self, **values: Any) -> None:
        self.api.changes.clear()
        self.api.serving.clear()
        self._config.upgrade(CHART, RELEASE, merged(BASE, values), timeout=LIMIT_S)

    def roll_back(self) -> None:
        self.api.changes.clear()
        self._config.rollback(RELEASE, timeout=LIMIT_S)

    @property
    def least_serving(self) -> int:
        """Replicas that served at the worst moment of the last upgrade."""
        return min(len(each) for each in self.api.serving)

    def uninstall(self) -> None:
        self.api.changes.clear()
        self._config.uninstall(RELEASE, timeout=LIMIT_S)

    @property
    def secrets(self) -> dict[str, str]:
        found: dict[str, str] = self.api.objects["Secret", "demo-outrider-secrets"]["data"]
        return found


@pytest.fixture
def release() -> Iterator[Release]:
    with running_api() as (api, url):
        access = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "nobody"}}],
            "users": [{"name": "nobody", "user": {}}],
        }
        content = json.dumps(access)
        with helm_python.Config(
            kubeconfig_content=content,
            namespace=NAMESPACE,
            storage_driver="memory",
            qps=1000.0,
            burst_limit=1000,
        ) as config:
            yield Release(api, url, config)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_rollout, "POLL_S", 0.02)
    monkeypatch.setattr(kube_rollout, "STUCK_S", 0.2)


def test_secrets_are_drawn_once_and_kept_by_upgrades(release: Release) -> None:
    drawn = release.secrets
    assert set(drawn) == {"secret", "auth_token", "api-key"}
    release.upgrade(replicas=2, image={"tag": "0.2.0"})
    assert release.secrets == drawn
    release.upgrade(replicas=2, hub={"token": "hf_x"})
    assert release.secrets.items() > drawn.items()


def test_without_the_gate_new_rayclusters_are_made_before_old_ones_are_deleted(
    release: Release,
) -> None:
    release.upgrade(replicas=2, upgrade={"gate": False})
    before = release.api.named("RayCluster")
    release.upgrade(replicas=2, image={"tag": "0.2.0"}, upgrade={"gate": False})
    after = release.api.named("RayCluster")
    assert len(before) == len(after) == 2 and not set(before) & set(after)
    changes = release.api.changed("RayCluster")
    assert changes[:2] == [("create", name) for name in after]
    assert sorted(changes[2:]) == [("delete", name) for name in before]
    assert not release.said


@pytest.mark.parametrize("max_surge", [0, 1])
def test_each_successor_serves_before_its_predecessor_goes(
    release: Release, max_surge: int
) -> None:
    before = release.api.named("RayCluster")
    release.upgrade(replicas=2, image={"tag": "0.2.0"}, upgrade={"maxSurge": max_surge})
    after = release.api.named("RayCluster")
    assert len(after) == 2 and not set(before) & set(after)
    assert release.least_serving == 1 + max_surge
    changes = release.api.changed("RayCluster")
    first, second = (("create", name) for name in after)
    suspended = ("update", before[0])
    order = (first, suspended) if max_surge else (suspended, first)
    assert changes[:3] == [*order, second if max_surge else ("update", before[1])]
    last = changes.index(("delete", before[0]))
    assert all(each != "create" for each, _ in changes[last:])  # Helm has taken them over
    assert not release.api.objects["RayCluster", after[0]]["spec"]["suspend"]
    assert {name for kind, name in release.api.objects if kind == "ConfigMap"} >= set(after)
    release.uninstall()
    assert not release.api.named("RayCluster")


@pytest.mark.parametrize("max_surge", [0, 1])
def test_an_image_that_does_not_exist_replaces_nothing(release: Release, max_surge: int) -> None:
    before = release.api.named("RayCluster")
    gateway = release.api.objects["Deployment", "demo-outrider-gateway"]
    release.api.bad_images.add("registry.example/outrider-engine:9.9.9")
    with pytest.raises(helm_python.HelmError):
        release.upgrade(replicas=2, image={"tag": "9.9.9"}, upgrade={"maxSurge": max_surge})
    assert release.api.named("RayCluster") == before
    assert not {("delete", name) for name in before} & set(release.api.changed("RayCluster"))
    assert release.least_serving == 1 + max_surge and release.api.serving[-1] == set(before)
    assert "ImagePullBackOff: Back-off pulling image" in release.said[-1]
    assert "replica 0 stays as it was" in release.said[-1]
    assert release.api.objects["Deployment", "demo-outrider-gateway"] == gateway
    release.roll_back()
    assert release.api.named("RayCluster") == before
    release.upgrade(replicas=2, image={"tag": "0.2.0"})
    assert not set(release.api.named("RayCluster")) & set(before)


def test_an_upgrade_is_rolled_back_behind_the_same_gate(release: Release) -> None:
    before = release.api.named("RayCluster")
    release.upgrade(replicas=2, image={"tag": "0.2.0"})
    release.api.serving.clear()
    release.roll_back()
    assert release.api.named("RayCluster") == before and release.least_serving == 2


def test_replicas_below_the_partition_are_not_touched(release: Release) -> None:
    first, second = release.api.named("RayCluster")
    upgrade = {"partition": 1, "previous": {"image": {"tag": ""}}}
    release.upgrade(replicas=2, image={"tag": "0.2.0"}, upgrade=upgrade)
    assert release.least_serving == 2
    assert first in release.api.named("RayCluster")
    assert second not in release.api.named("RayCluster")
    changed = {name for what, name in release.api.changed("RayCluster") if what != "update"}
    assert not release.api.objects["RayCluster", first]["spec"]["suspend"]
    assert first not in changed and len(changed) == 2


def test_more_and_fewer_replicas_leave_the_others_alone(release: Release) -> None:
    before = release.api.named("RayCluster")
    release.upgrade(replicas=3)
    assert release.api.named("RayCluster")[:2] == before
    release.upgrade(replicas=1)
    assert release.api.named("RayCluster") == before[:1]
    assert "create" not in {what for what, _ in release.api.changed("RayCluster")}


def test_weights_outlive_the_release_and_nothing_else_does(release: Release) -> None:
    release.upgrade(modelCache={"type": "pvc"})
    release.uninstall()
    left = {each for each in release.api.objects if each[1] != "demo-outrider-upgrade"}
    assert left == {("PersistentVolumeClaim", "demo-outrider-models")}
