"""The RayClusters of a release are replaced one at a time, behind a gate, through a stand-in of the
API server that makes pods as KubeRay would."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_api import KubeApi, running_api

from outrider.cli import main
from outrider.cluster.deploy import kube_rollout
from outrider.cluster.deploy.kube import RAY_CLUSTERS, Kube, KubeError
from outrider.cluster.deploy.kube_rollout import (
    DesiredReplica,
    RolloutPlan,
    index_of,
    observe,
    roll_out,
)
from outrider.cluster.errors import ClusterError
from outrider.errors import ConfigError

LABELS = {"app.kubernetes.io/instance": "demo"}
OLD, NEW, BAD = "a" * 8, "b" * 8, "c" * 8
LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(120)


def desired(index: int, version: str) -> DesiredReplica:
    name = f"demo-{index}-{version}"

    def group() -> dict[str, Any]:
        containers = [{"name": "ray", "image": f"engine:{version}"}]
        return {"template": {"metadata": {"labels": LABELS}, "spec": {"containers": containers}}}

    metadata = {"name": name, "labels": dict(LABELS)}
    spec = {
        "suspend": False,
        "headGroupSpec": group(),
        "workerGroupSpecs": [{"groupName": "target", **group()}],
    }
    cluster = {"kind": "RayCluster", "metadata": metadata, "spec": spec}
    return DesiredReplica(
        index, cluster, {"kind": "ConfigMap", "metadata": dict(metadata), "data": {}}
    )


def plan(version: str, num_replicas: int = 2, **fields: Any) -> RolloutPlan:
    replicas = tuple(desired(index, version) for index in range(num_replicas))
    times = {"settle_s": 0.0, "start_s": 20.0, "stop_s": 20.0}
    return RolloutPlan(
        "demo", "llm", "demo", LABELS, **({"max_surge": 1} | times | fields), replicas=replicas
    )


class Cluster:
    def __init__(self, api: KubeApi, url: str) -> None:
        self.api = api
        self.kube = Kube(url, "llm")
        self.said: list[str] = []
        for each in plan(OLD).replicas:
            self.kube.create(RAY_CLUSTERS, each.cluster)
        api.changes.clear()
        api.serving.clear()
        api.bad_images.add(f"engine:{BAD}")

    def roll(self, wanted: RolloutPlan) -> None:
        async def run() -> None:
            async with asyncio.timeout(LIMIT_S):
                await roll_out(self.kube, wanted, lambda event: self.said.append(event.text))

        asyncio.run(run())

    @property
    def names(self) -> list[str]:
        return self.api.named("RayCluster")

    @property
    def suspended(self) -> list[str]:
        return [n for n in self.names if self.api.objects["RayCluster", n]["spec"]["suspend"]]

    @property
    def least_serving(self) -> int:
        return min(len(each) for each in self.api.serving)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(kube_rollout, "POLL_S", 0.01)
    monkeypatch.setattr(kube_rollout, "STUCK_S", 0.1)
    with running_api() as (api, url):
        yield Cluster(api, url)


@pytest.mark.parametrize("max_surge", [0, 1])
def test_all_are_replaced_and_predecessors_are_deleted_last(
    cluster: Cluster, max_surge: int
) -> None:
    cluster.roll(plan(NEW, max_surge=max_surge))
    assert cluster.names == [f"demo-0-{NEW}", f"demo-1-{NEW}"] and not cluster.suspended
    assert cluster.least_serving == 1 + max_surge
    changes = [what for what, _ in cluster.api.changed("RayCluster")]
    assert changes[-2:] == ["delete", "delete"] and changes.count("delete") == 2
    made = cluster.api.objects["RayCluster", f"demo-0-{NEW}"]["metadata"]["annotations"]
    assert made["meta.helm.sh/release-name"] == "demo"


@pytest.mark.parametrize("max_surge", [0, 1])
def test_an_image_that_cannot_be_pulled_deletes_no_predecessor(
    cluster: Cluster, max_surge: int
) -> None:
    before = cluster.names
    with pytest.raises(ClusterError, match=r"replica 0 stays as it was: .*ImagePullBackOff"):
        cluster.roll(plan(BAD, max_surge=max_surge))
    assert cluster.names == before and not cluster.suspended
    assert cluster.least_serving == 1 + max_surge
    deleted = {name for what, name in cluster.api.changed("RayCluster") if what == "delete"}
    assert deleted == {f"demo-0-{BAD}"}
    assert ("ConfigMap", f"demo-0-{BAD}") not in cluster.api.objects


@pytest.mark.parametrize("max_surge", [0, 1])
def test_a_failure_of_the_second_puts_the_first_back(cluster: Cluster, max_surge: int) -> None:
    wanted = plan(NEW, max_surge=max_surge)
    mixed = dataclasses.replace(wanted, replicas=(wanted.replicas[0], desired(1, BAD)))
    before = cluster.names
    with pytest.raises(ClusterError, match="replica 1 stays as it was"):
        cluster.roll(mixed)
    assert cluster.names == before and not cluster.suspended
    assert cluster.least_serving == 1 + max_surge
    assert "replica 0 is rolled back" in cluster.said


@pytest.mark.parametrize("max_surge", [0, 1])
def test_a_run_that_was_interrupted_is_taken_up_by_the_next(
    cluster: Cluster, max_surge: int
) -> None:
    """Whatever request it was that had no answer."""
    send = Kube._send
    for after in range(1, 7):
        wanted, other = (NEW, OLD) if after % 2 else (OLD, NEW)
        count = 0
        patched = pytest.MonkeyPatch()

        def dies(self: Kube, *args: Any, _limit: int = after, **more: Any) -> Any:
            nonlocal count
            if args[0] != "GET":
                count += 1
                if count > _limit:
                    raise KeyboardInterrupt
            return send(self, *args, **more)

        with patched.context() as context:
            context.setattr(Kube, "_send", dies)
            with pytest.raises(KeyboardInterrupt):
                cluster.roll(plan(wanted, max_surge=max_surge))
        cluster.roll(plan(wanted, max_surge=max_surge))
        assert cluster.names == [f"demo-{index}-{wanted}" for index in (0, 1)], (after, other)
        assert not cluster.suspended
    assert cluster.least_serving == 1 + max_surge


def test_what_a_failed_attempt_has_left_is_removed(cluster: Cluster) -> None:
    for each in plan(BAD).replicas[:1]:
        cluster.kube.create(RAY_CLUSTERS, each.cluster)
    cluster.roll(plan(NEW))
    assert cluster.names == [f"demo-0-{NEW}", f"demo-1-{NEW}"]


def test_one_that_serves_nobody_is_replaced_first(cluster: Cluster) -> None:
    cluster.kube.delete(RAY_CLUSTERS, f"demo-1-{OLD}")
    cluster.kube.create(RAY_CLUSTERS, desired(1, BAD).cluster)
    cluster.api.changes.clear()
    cluster.roll(plan(NEW, max_surge=0))
    assert cluster.api.changed("RayCluster")[0] == ("update", f"demo-1-{BAD}")
    assert cluster.names == [f"demo-0-{NEW}", f"demo-1-{NEW}"]


def test_without_a_spare_none_ends_while_another_is_away(cluster: Cluster) -> None:
    cluster.kube.delete(RAY_CLUSTERS, f"demo-1-{OLD}")
    cluster.kube.create(RAY_CLUSTERS, desired(1, BAD).cluster)
    cluster.api.changes.clear()
    wanted = plan(NEW, max_surge=0, start_s=0.2)
    wanted = dataclasses.replace(wanted, replicas=(wanted.replicas[0], desired(1, BAD)))
    with pytest.raises(ClusterError, match="replica 1 does not serve, and with upgrade.maxSurge 0"):
        cluster.roll(wanted)
    assert not cluster.api.changed("RayCluster")


def test_what_is_new_is_left_to_helm_and_what_is_as_it_was_is_not_touched(
    cluster: Cluster,
) -> None:
    cluster.roll(plan(OLD, 3))
    assert not cluster.api.changed("RayCluster")
    cluster.roll(plan(NEW, 3))
    assert cluster.names == [f"demo-0-{NEW}", f"demo-1-{NEW}"]


def test_an_api_server_that_is_away_for_a_moment_is_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failures = Kube._send, iter([KubeError("GET: refused."), KubeError("busy.", 503)])

    def sometimes(self: Kube, *args: Any, **more: Any) -> Any:
        for failure in failures:
            raise failure
        return send(self, *args, **more)

    monkeypatch.setattr(Kube, "_send", sometimes)
    cluster.roll(plan(NEW))
    assert cluster.names == [f"demo-0-{NEW}", f"demo-1-{NEW}"]


def test_a_refusal_is_told_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Kube, *args: Any, **more: Any) -> Any:
        raise KubeError("rayclusters.ray.io is forbidden.", 403)

    monkeypatch.setattr(Kube, "_send", refuse)
    with pytest.raises(KubeError, match="is forbidden"):
        cluster.roll(plan(NEW))


# -- what is read of objects --------------------------------------------------------------------


def pod(name: str = "p", **status: Any) -> dict[str, Any]:
    labels = {"ray.io/cluster": f"demo-0-{OLD}", "ray.io/node-type": "head"}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


READY = [{"type": "Ready", "status": "True"}]


def test_a_replica_serves_when_its_head_is_ready_and_stays() -> None:
    clusters = [desired(0, OLD).cluster]
    name = f"demo-0-{OLD}"
    assert observe("demo", clusters, [pod(conditions=READY)])[name].serves
    assert not observe("demo", clusters, [pod()])[name].serves
    leaving = pod(conditions=READY)
    leaving["metadata"]["deletionTimestamp"] = "now"
    found = observe("demo", clusters, [leaving])[name]
    assert not found.serves and found.num_pods == 1
    worker = pod(conditions=READY)
    worker["metadata"]["labels"]["ray.io/node-type"] = "worker"
    assert not observe("demo", clusters, [worker])[name].serves


def test_pods_outlive_their_raycluster() -> None:
    found = observe("demo", [], [pod(conditions=READY)])[f"demo-0-{OLD}"]
    assert found.is_deleted and found.num_pods == 1


def test_why_a_pod_does_not_start_is_found() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found."}}
    clusters, name = [desired(0, OLD).cluster], f"demo-0-{OLD}"
    stuck = pod("x", containerStatuses=[{"name": "ray", "state": waiting}])
    assert observe("demo", clusters, [stuck])[name].stuck == "pod x: ErrImagePull: not found"
    placed = [{"type": "PodScheduled", "status": "False", "message": "Insufficient gpu."}]
    pending = observe("demo", clusters, [pod("y", conditions=placed)])[name]
    assert pending.pending == "pod y is pending: Insufficient gpu" and not pending.stuck


@pytest.mark.parametrize("name", ["demo", "demo-0", "demo-0-xyz", "other-0-aaaaaaaa"])
def test_other_names_are_no_replicas(name: str) -> None:
    with pytest.raises(ValueError):
        index_of("demo", name)
    item = desired(0, OLD).cluster
    item["metadata"]["name"] = name
    assert observe("demo", [item], []) == {}


def test_a_file_that_is_no_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="the rollout's file cannot be read"):
        RolloutPlan.of({"base": "demo"}, [])


def test_outside_of_a_cluster_there_is_no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="there is no Kubernetes API to reach"):
        Kube.in_cluster()


def test_the_command_reads_what_the_chart_renders(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Kube, "in_cluster", lambda: cluster.kube)
    settings = {"release": "demo", "namespace": "llm", "base": "demo", "labels": LABELS}
    times = {"maxSurge": 1, "settleSeconds": 0, "startSeconds": 20, "stopSeconds": 20}
    objects = [item for each in plan(NEW).replicas for item in (each.config_map, each.cluster)]
    file = tmp_path / "replicas.yaml"
    file.write_text(yaml.safe_dump_all([settings | times, *objects]), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "--kube", str(file)])
    assert not ended.value.code
    assert cluster.names == [f"demo-0-{NEW}", f"demo-1-{NEW}"]
    assert "replicas replaced: 2" in capsys.readouterr().out
    cluster.api.bad_images.add(f"engine:{OLD}")
    objects = [item for each in plan(OLD).replicas for item in (each.config_map, each.cluster)]
    file.write_text(yaml.safe_dump_all([settings | times, *objects]), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "--kube", str(file)])
    assert ended.value.code == 1  # which the Job does not try again
    assert "replica 0 stays as it was" in capsys.readouterr().err


def test_the_image_of_gateways_can_run_it() -> None:
    """It has neither torch nor Ray."""
    code = (
        "import sys, outrider.cli.rollout, outrider.cluster.deploy.kube_rollout;"
        "import outrider.cluster.deploy.leaving;"
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
