"""Releases as Helm makes them: what an install draws is kept, and what is new comes before what is
old goes. The API server is a stand-in that keeps objects and runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
from chart_tools import BASE, CHART, NAMESPACE, RELEASE, merged
from kube_api import KubeApi, running_api

pytestmark = pytest.mark.thorough

LIMIT_S = 60


class Release:
    """One that is installed, in a cluster of its own."""

    def __init__(self, api: KubeApi, config: helm_python.Config) -> None:
        self.api = api
        self._config = config
        self._config.install(CHART, RELEASE, merged(BASE, {"replicas": 2}), timeout=LIMIT_S)

    def upgrade(self, **values: Any) -> None:
        self.api.changes.clear()
        self._config.upgrade(CHART, RELEASE, merged(BASE, values), timeout=LIMIT_S)

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
            yield Release(api, config)


def test_secrets_are_drawn_once_and_kept_by_upgrades(release: Release) -> None:
    drawn = release.secrets
    assert set(drawn) == {"secret", "auth_token", "api-key"}
    release.upgrade(replicas=2, image={"tag": "0.2.0"})
    assert release.secrets == drawn
    release.upgrade(replicas=2, hub={"token": "hf_x"})
    assert release.secrets.items() > drawn.items()


def test_new_rayclusters_are_made_before_old_ones_are_deleted(release: Release) -> None:
    before = release.api.named("RayCluster")
    release.upgrade(replicas=2, image={"tag": "0.2.0"})
    after = release.api.named("RayCluster")
    assert len(before) == len(after) == 2 and not set(before) & set(after)
    changes = release.api.changed("RayCluster")
    assert changes[:2] == [("create", name) for name in after]
    assert sorted(changes[2:]) == [("delete", name) for name in before]


def test_replicas_below_the_partition_are_not_touched(release: Release) -> None:
    first, second = release.api.named("RayCluster")
    upgrade = {"partition": 1, "previous": {"image": {"tag": ""}}}
    release.upgrade(replicas=2, image={"tag": "0.2.0"}, upgrade=upgrade)
    assert first in release.api.named("RayCluster")
    assert second not in release.api.named("RayCluster")
    changed = {name for what, name in release.api.changed("RayCluster") if what != "update"}
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
    assert set(release.api.objects) == {("PersistentVolumeClaim", "demo-outrider-models")}
