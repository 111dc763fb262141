"""RayClusters: who runs where, and what Ray is told."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import yaml
from chart_tools import CHART, ROOT, Rendered, example, render

FOUR = "four-plus-one"


def cluster_of(rendered: Rendered) -> dict[str, Any]:
    found: dict[str, Any] = rendered.one("RayCluster")["spec"]
    return found


def groups_of(rendered: Rendered) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in cluster_of(rendered)["workerGroupSpecs"]}


def names(rendered: Rendered) -> list[str]:
    return [each["metadata"]["name"] for each in rendered.all("RayCluster")]


def test_plain_mode_renders_no_raycluster() -> None:
    rendered = render(mode="plain")
    assert rendered.of("raycluster.yaml") == []
    assert rendered.of("controllers-service.yaml") == []


def test_no_replica_is_no_raycluster() -> None:
    assert render(replicas=0).of("raycluster.yaml") == []


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_each_replica_is_a_raycluster_with_a_configuration_of_its_own(replicas: int) -> None:
    rendered = render(replicas=replicas)
    assert len(set(names(rendered))) == replicas
    for name in names(rendered):
        assert rendered.config(name)["cluster"]["replicas"] == 1


def test_the_head_has_no_gpu_and_takes_no_rank() -> None:
    head = cluster_of(example(FOUR))["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert head["rayStartParams"]["num-gpus"] == "0"
    for container in head["template"]["spec"]["containers"]:
        assert "nvidia.com/gpu" not in container["resources"].get("limits", {})


def test_the_controller_can_attach_to_the_ray_beside_it() -> None:
    """By sockets below /tmp/ray, known by its process id, with Ray's token."""
    pod = example(FOUR).pod("controller")
    ray, controller = pod.container("ray-head"), pod.container("controller")
    assert pod.spec["containers"][0] is ray, "KubeRay takes the first one for Ray's"
    assert pod.spec["shareProcessNamespace"] is True
    for path in ("/tmp", "/dev/shm"):
        assert _volume_at(ray, path) == _volume_at(controller, path)
    assert ray["image"] == controller["image"]
    assert _env(controller)["RAY_AUTH_MODE"] == {"name": "RAY_AUTH_MODE", "value": "token"}
    assert _env(controller)["RAY_AUTH_TOKEN"] == _env(ray)["RAY_AUTH_TOKEN"]


def _volume_at(container: dict[str, Any], path: str) -> str:
    (name,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == path)
    return str(name)


def _env(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in container["env"]}


def test_kuberay_writes_the_command_and_the_probes_of_ray() -> None:
    for pod in example(FOUR).pods:
        if pod.owner.startswith("RayCluster"):
            ray = pod.spec["containers"][0]
            assert not {"command", "args", "livenessProbe", "readinessProbe"} & ray.keys()


def test_ray_is_told_its_version_and_where_its_token_is() -> None:
    rendered = render()
    spec = cluster_of(rendered)
    assert spec["authOptions"] == {"mode": "token", "secretName": "demo-outrider-secrets"}
    assert "auth_token" in rendered.one("Secret")["data"]
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 53, 0), "HTTP probes need it"


def test_the_version_of_ray_is_the_one_that_is_tested_with() -> None:
    assert cluster_of(render())["rayVersion"] == version("ray")


def test_roles_are_groups_with_labels_that_the_configuration_asks_for() -> None:
    rendered = example(FOUR)
    groups = groups_of(rendered)
    cluster = rendered.config(names(rendered)[0])["cluster"]
    for role in ("target", "draft"):
        assert [f"outrider-role={role}"] == cluster[f"{role}_labels"]
        assert groups[role]["labels"] == {"outrider-role": role}
        assert "labels" not in groups[role]["rayStartParams"], "which KubeRay refuses"
        assert groups[role]["minReplicas"] == groups[role]["maxReplicas"] == 1


def test_a_pod_has_a_gpu_and_a_seat_for_each_of_its_ranks() -> None:
    groups = groups_of(example(FOUR))
    for role, ranks in (("target", 4), ("draft", 1)):
        (container,) = groups[role]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(ranks)
        assert int(groups[role]["rayStartParams"]["num-cpus"]) >= ranks + 1


def test_ranks_are_divided_over_nodes() -> None:
    (target, *_) = example("production").all("RayCluster")[0]["spec"]["workerGroupSpecs"]
    assert target["replicas"] == target["minReplicas"] == target["maxReplicas"] == 2
    (container,) = target["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_gpus_may_have_another_name() -> None:
    target = groups_of(render(engine={"gpuResource": "amd.com/gpu"}))["target"]
    (container,) = target["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["amd.com/gpu"] == "1"


def test_a_draft_may_have_a_slice_of_a_gpu_of_its_own_kind() -> None:
    slice_of = "nvidia.com/mig-1g.10gb"
    groups = groups_of(render(target={"tensorParallel": 4}, draft={"gpuResource": slice_of}))
    for role, resource, count in (("target", "nvidia.com/gpu", "4"), ("draft", slice_of, "1")):
        (container,) = groups[role]["template"]["spec"]["containers"]
        gpus = {k: v for k, v in container["resources"]["limits"].items() if "/" in k}
        assert gpus == {resource: count}


def test_ray_is_told_its_gpus_whatever_they_are_called() -> None:
    """KubeRay counts only resources whose names end in gpu."""
    groups = groups_of(render(draft={"gpuResource": "nvidia.com/mig-1g.10gb"}))
    assert {role: group["rayStartParams"]["num-gpus"] for role, group in groups.items()} == {
        "target": "1",
        "draft": "1",
    }
    for group in groups_of(example("cpu-demo")).values():
        assert group["rayStartParams"]["num-gpus"] == "0"


def test_one_pod_adds_up_the_gpus_of_each_kind() -> None:
    def limits(**values: Any) -> dict[str, str]:
        (container,) = render(mode="plain", replicas=2, **values).pod("server").spec["containers"]
        return {k: v for k, v in container["resources"]["limits"].items() if "/" in k}

    assert limits(target={"tensorParallel": 3}) == {"nvidia.com/gpu": "8"}
    assert limits(draft={"gpuResource": "nvidia.com/mig-1g.10gb"}) == {
        "nvidia.com/gpu": "2",
        "nvidia.com/mig-1g.10gb": "2",
    }
    assert limits(target={"device": "cpu"}) == {}


def test_a_controller_waits_for_the_ray_beside_it() -> None:
    rendered = render(engine={"placementTimeoutSeconds": 321})
    assert rendered.config(names(rendered)[0])["cluster"]["ray_timeout_s"] == 321


def test_replicas_are_numbered_over_all_controllers_of_a_release() -> None:
    rendered = render(replicas=3)
    numbers = [rendered.config(name)["cluster"]["first_replica"] for name in names(rendered)]
    assert numbers == [0, 1, 2]


def test_the_operator_that_is_needed_is_named_the_same_everywhere() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["annotations"]["outrider/kuberay"] == ">=1.6.0"
    assert ">=1.6.0" in render().texts["outrider/templates/NOTES.txt"]
    assert "KubeRay" not in render(mode="plain").texts["outrider/templates/NOTES.txt"]
    for file in (CHART / "values.yaml", ROOT / "docs" / "helm.md"):
        assert "KubeRay operator 1.6" in file.read_text(encoding="utf-8")


def test_cpus_ask_for_no_gpu() -> None:
    for group in groups_of(example("cpu-demo")).values():
        (container,) = group["template"]["spec"]["containers"]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_a_draft_may_be_on_cpus_beside_a_target_on_gpus() -> None:
    rendered = render(draft={"device": "cpu"})
    (container,) = groups_of(rendered)["draft"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert rendered.config(names(rendered)[0])["draft"]["device"] == "cpu"


@pytest.mark.parametrize(
    "draft", [{"colocate": True}, {"method": "ngram"}, {"method": "off"}], ids=str
)
def test_where_no_draft_is_apart_there_is_no_group_for_it(draft: dict[str, Any]) -> None:
    rendered = render(draft=draft)
    assert set(groups_of(rendered)) == {"target"}
    config = rendered.config(names(rendered)[0])
    assert "draft_labels" not in config["cluster"]
    assert config["cluster"].get("colocate") == (True if "colocate" in draft else None)


def test_each_role_has_its_own_place() -> None:
    placed = {
        "nodeSelector": {"kind": "a"},
        "tolerations": [{"operator": "Exists"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    }
    for role, component in (("target", "target"), ("draft", "draft"), ("head", "controller")):
        rendered = render({role: placed})
        spec = rendered.pod(component).spec
        assert {key: spec[key] for key in placed} == placed
        for other in {"target", "draft", "controller"} - {component}:
            assert "nodeSelector" not in rendered.pod(other).spec


def test_a_draft_prefers_the_node_of_its_own_target() -> None:
    affinity = render().pod("draft").spec["affinity"]["podAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["matchLabelKeys"] == ["ray.io/cluster"]
    labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels.items() <= render().pod("target").labels.items()
    assert "affinity" not in render(draft={"nearTarget": False}).pod("draft").spec
    own: dict[str, Any] = {"nodeAffinity": {}}
    assert render(draft={"affinity": own}).pod("draft").spec["affinity"] == own


def test_shared_memory_is_as_large_as_asked_for() -> None:
    for pod in example(FOUR).pods:
        if pod.owner.startswith("RayCluster"):
            volume = next(v for v in pod.spec["volumes"] if v["name"] == "shared-mem")
            assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_extras_reach_every_pod_with_engines() -> None:
    rendered = render(
        engine={
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "podLabels": {"c": "d"},
        }
    )
    for pod in rendered.pods:
        if pod.owner.startswith("RayCluster"):
            assert pod.labels["c"] == "d"
            for container in pod.spec["containers"]:
                assert {"name": "A", "value": "b"} in container["env"]
                assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]


def test_gateways_find_controllers_that_are_not_ready_yet() -> None:
    rendered = render()
    service = rendered.one("Service", "demo-outrider-controllers")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    pod = rendered.pod("controller")
    assert service["selector"].items() <= pod.labels.items()
    (port,) = service["ports"]
    ports = {p["name"]: p["containerPort"] for p in pod.container("controller")["ports"]}
    assert ports[port["targetPort"]] == port["port"] == 50060
    controllers = rendered.config("demo-outrider-gateway")["server"]["controllers"]
    assert controllers == ["demo-outrider-controllers.llm.svc:50060"]
    assert rendered.config(names(rendered)[0])["cluster"]["listen"] == "0.0.0.0:50060"
