"""What holds for every pod of every example."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from chart_tools import EXAMPLES, Pod, Rendered, example, render

from outrider.cli import main
from outrider.cluster.deadline import END_S

SERVERS = {"gateway", "controller", "server"}  # containers of ours that serve
CASES = [(name, pod) for name in EXAMPLES for pod in example(name).pods]
IDS = [f"{name}: {pod.owner} {pod.component}" for name, pod in CASES]


def servers() -> Iterator[tuple[str, Pod, dict[str, Any]]]:
    for name, pod in CASES:
        for container in pod.spec["containers"]:
            if container["name"] in SERVERS:
                yield name, pod, container


@pytest.mark.parametrize(("name", "pod"), CASES, ids=IDS)
def test_no_service_tells_its_variables(name: str, pod: Pod) -> None:
    """A Service named outrider would set OUTRIDER_PORT=tcp://..., which is no setting."""
    assert pod.spec["enableServiceLinks"] is False


@pytest.mark.parametrize(("name", "pod"), CASES, ids=IDS)
def test_nobody_is_root_or_may_write_to_the_image(name: str, pod: Pod) -> None:
    context = pod.spec["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod.spec["containers"]:
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize(("name", "pod"), CASES, ids=IDS)
def test_only_the_upgrade_has_a_token_of_the_api_server(name: str, pod: Pod) -> None:
    is_upgrade = pod.component == "upgrade"
    assert pod.spec["automountServiceAccountToken"] is is_upgrade
    account = example(name).one("ServiceAccount", pod.spec["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False  # a pod must ask for it
    bound = [s["name"] for each in example(name).all("RoleBinding") for s in each["subjects"]]
    assert (account["metadata"]["name"] in bound) is is_upgrade
    assert not example(name).all("ClusterRole")


@pytest.mark.parametrize(("name", "pod"), CASES, ids=IDS)
def test_every_volume_is_there_and_used(name: str, pod: Pod) -> None:
    volumes = [volume["name"] for volume in pod.spec["volumes"]]
    mounts = {m["name"] for c in pod.spec["containers"] for m in c["volumeMounts"]}
    assert len(set(volumes)) == len(volumes)
    assert set(volumes) == mounts


@pytest.mark.parametrize(("name", "pod"), CASES, ids=IDS)
def test_images_are_named_by_version_or_digest(name: str, pod: Pod) -> None:
    for container in pod.spec["containers"]:
        _, _, version = container["image"].rpartition("/")
        assert "@sha256:" in version or ":" in version
        assert not version.endswith(":latest")


@pytest.mark.parametrize(("name", "pod"), CASES, ids=IDS)
def test_every_container_asks_for_cpu_and_memory(name: str, pod: Pod) -> None:
    for container in pod.spec["containers"]:
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


@pytest.mark.parametrize(("name", "pod"), CASES, ids=IDS)
def test_variables_and_volumes_are_of_secrets_that_are_made_or_given(name: str, pod: Pod) -> None:
    rendered = example(name)
    made = {item["metadata"]["name"]: item["data"] for item in rendered.all("Secret")}
    for container in pod.spec["containers"]:
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None and reference["name"] in made:
                assert reference["key"] in made[reference["name"]]
            elif reference is not None:
                assert not reference["name"].startswith("demo-outrider")
    for volume in pod.spec["volumes"]:
        if "configMap" in volume:
            assert rendered.one("ConfigMap", volume["configMap"]["name"])


def grace_left(rendered: Rendered, pod: Pod, container: dict[str, Any]) -> float:
    """Of the time a pod has to end: what is left when preStop and drain have taken theirs."""
    (volume,) = (v for v in pod.spec["volumes"] if v["name"] == "config")
    drain_s: float = rendered.config(volume["configMap"]["name"])["server"]["drain_s"]
    grace_s: float = pod.spec["terminationGracePeriodSeconds"]
    return grace_s - _pre_stop_s(container) - drain_s


def _pre_stop_s(container: dict[str, Any]) -> float:
    """The longest that it takes."""
    handler = container.get("lifecycle", {}).get("preStop", {})
    if "exec" in handler:
        options = dict(each.split("=") for each in handler["exec"]["command"] if "=" in each)
        return float(options["--limit"]) + float(options.get("--after", 0))
    found: float = handler.get("sleep", {"seconds": 0})["seconds"]
    return found


def test_the_grace_period_covers_pre_stop_drain_and_the_end() -> None:
    checked = 0
    for name, pod, container in servers():
        assert grace_left(example(name), pod, container) >= END_S + 5, pod.owner
        checked += 1
    assert checked >= 8


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": {"preStopSeconds": 0, "drainSeconds": 1}},
        {"gateway": {"preStopSeconds": 60, "drainSeconds": 3600}},
        {"upgrade": {"handoverSeconds": 0}, "engine": {"drainSeconds": 1}},
        {"upgrade": {"handoverSeconds": 1800}, "engine": {"drainSeconds": 600}},
        {"mode": "plain", "gateway": {"preStopSeconds": 30, "drainSeconds": 900}},
    ],
)
def test_it_does_so_whatever_the_values_are(values: dict[str, Any]) -> None:
    rendered = render(values)
    for pod in rendered.pods:
        for container in pod.spec["containers"]:
            if container["name"] in SERVERS:
                assert grace_left(rendered, pod, container) >= END_S + 5


def test_ray_outlives_the_controller_that_drains() -> None:
    """All pods of a RayCluster are told to end at once; ranks must be there until the last."""
    rendered = example("production")
    for cluster in rendered.all("RayCluster"):
        pods = [p for p in rendered.pods if p.owner.endswith(cluster["metadata"]["name"])]
        head = next(pod for pod in pods if pod.component == "controller")
        drained_s = _pre_stop_s(head.container("controller")) + 60 + END_S
        for pod in pods:
            ray = pod.spec["containers"][0]
            assert drained_s <= _pre_stop_s(ray) < pod.spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_that_is_to_end_tells_the_controller(role: str) -> None:
    def command(**values: Any) -> list[str]:
        handler = render(**values).pod(role).container(role)["lifecycle"]["preStop"]
        found: list[str] = handler["exec"]["command"]
        return found

    engine = {"moveSeconds": 100, "drainSeconds": 30}
    found = command(engine=engine)
    assert found == ["outrider", "leave", "--limit=150", "--unreached=50"]
    ungated = command(engine=engine, upgrade={"gate": False, "handoverSeconds": 7})
    assert ungated == [*found, "--after=7"]
    # Its options are those of the command; the image has it and the pod the secret.
    with pytest.raises(SystemExit) as ended:
        main(["leave", *found[2:], "--help"])
    assert ended.value.code == 0
    env = render().pod(role).container(role)["env"]
    assert "OUTRIDER_SECRET" in {each["name"] for each in env}


def test_probes_ask_the_admin_port_of_what_serves() -> None:
    for _, pod, container in servers():
        (admin,) = (p["containerPort"] for p in container["ports"] if p["name"] == "admin")
        assert admin == 8081
        for probe, path in (
            ("livenessProbe", "/livez"),
            ("startupProbe", "/livez"),
            ("readinessProbe", "/readyz"),
        ):
            assert container[probe]["httpGet"] == {"path": path, "port": "admin"}, pod.owner


def test_a_start_may_take_as_long_as_the_configuration_allows() -> None:
    for name, _, container in servers():
        probe = container["startupProbe"]
        allowed_s = probe["periodSeconds"] * probe["failureThreshold"]
        for item in example(name).all("ConfigMap"):
            if "config.yaml" in item["data"]:
                cluster = example(name).config(item["metadata"]["name"]).get("cluster", {})
                wanted_s = cluster.get("start_timeout_s", 0) + cluster.get("placement_timeout_s", 0)
                assert allowed_s >= wanted_s


@pytest.mark.parametrize(("period", "timeout"), [(7, 600), (60, 61), (10, 1)])
def test_the_number_of_tries_is_rounded_up(period: int, timeout: int) -> None:
    rendered = render(probes={"periodSeconds": period}, engine={"startTimeoutSeconds": timeout})
    probe = rendered.pod("gateway").container("gateway")["startupProbe"]
    assert probe["failureThreshold"] == math.ceil((timeout + 600) / period)


def test_nobody_who_hangs_is_waited_for_as_long_as_one_who_drains() -> None:
    for _, pod, container in servers():
        probe = container["livenessProbe"]
        whole_s = pod.spec["terminationGracePeriodSeconds"]
        assert probe["terminationGracePeriodSeconds"] <= min(30, whole_s)


def test_pull_secrets_reach_every_pod() -> None:
    rendered = render(image={"pullSecrets": ["one", "two"]})
    for pod in rendered.pods:
        assert pod.spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
