"""Gateways, their Services, and the one pod of mode plain."""

from __future__ import annotations

from typing import Any

from chart_tools import example, render

GATEWAY = "demo-outrider-gateway"


def test_plain_mode_renders_no_gateway() -> None:
    rendered = render(mode="plain")
    assert rendered.of("gateway-deployment.yaml") == rendered.of("gateway-config.yaml") == []


def test_kuberay_mode_renders_no_statefulset() -> None:
    assert render().of("statefulset.yaml") == []


def test_gateways_are_replaced_one_by_one_and_none_is_missed() -> None:
    spec = render(gateway={"replicas": 3}).one("Deployment")["spec"]
    assert spec["replicas"] == 3
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_a_changed_configuration_replaces_gateways() -> None:
    def checksum(**values: Any) -> str:
        template = render(**values).one("Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum(service={"type": "NodePort"})
    assert checksum() != checksum(config={"server": {"max_requests": 5}})


def test_services_lead_to_the_ports_of_gateways() -> None:
    for mode, component in (("kuberay", "gateway"), ("plain", "server")):
        rendered = render(mode=mode)
        pod = rendered.pod(component)
        ports = {p["name"]: p["containerPort"] for p in pod.container(component)["ports"]}
        assert ports == {"http": 8000, "grpc": 50051, "admin": 8081}
        for name in (GATEWAY, f"{GATEWAY}-headless"):
            spec = rendered.one("Service", name)["spec"]
            assert spec["selector"].items() <= pod.labels.items()
            assert {p["name"]: p["targetPort"] for p in spec["ports"]} == {
                "http": "http",
                "grpc": "grpc",
            }


def test_the_admin_port_is_no_part_of_what_clients_are_given() -> None:
    for service in render().all("Service"):
        assert "admin" not in {port["name"] for port in service["spec"]["ports"]}


def test_clients_that_balance_by_themselves_find_all_gateways() -> None:
    spec = render().one("Service", f"{GATEWAY}-headless")["spec"]
    assert spec["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in spec


def test_ports_type_and_annotations_of_the_service_can_be_set() -> None:
    service = render(
        service={
            "type": "LoadBalancer",
            "httpPort": 80,
            "grpcPort": 81,
            "annotations": {"a": "b"},
            "externalTrafficPolicy": "Local",
        }
    ).one("Service", GATEWAY)
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["externalTrafficPolicy"] == "Local"
    assert [port["port"] for port in service["spec"]["ports"]] == [80, 81]


def test_grpc_connections_are_made_anew_so_that_they_spread() -> None:
    server = render().config(GATEWAY)["server"]
    assert server["max_connection_age_s"] == 300 and server["max_connection_grace_s"] == 600


def test_any_setting_can_be_given_and_goes_before_the_charts() -> None:
    config = {"server": {"drain_s": 7, "max_requests": 9}, "log_level": "debug"}
    rendered = render(config=config)
    for name in (GATEWAY, rendered.one("RayCluster")["metadata"]["name"]):
        found = rendered.config(name)
        assert found["server"]["drain_s"] == 7 and found["server"]["max_requests"] == 9
        assert found["log_level"] == "debug" and found["log_format"] == "json"


def test_gateways_spread_over_nodes_unless_told_otherwise() -> None:
    (spread,) = render().pod("gateway").spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"].items() <= render().pod("gateway").labels.items()
    own = [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    spec = render(gateway={"topologySpreadConstraints": own}).pod("gateway").spec
    assert spec["topologySpreadConstraints"] == own


def test_extras_reach_the_gateways() -> None:
    rendered = render(
        gateway={
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "podLabels": {"c": "d"},
            "podAnnotations": {"e": "f"},
            "priorityClassName": "high",
        }
    )
    pod = rendered.pod("gateway")
    container = pod.container("gateway")
    assert {"name": "A", "value": "b"} in container["env"]
    assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]
    assert pod.labels["c"] == "d" and pod.spec["priorityClassName"] == "high"
    template = rendered.one("Deployment")["spec"]["template"]
    assert template["metadata"]["annotations"]["e"] == "f"


def test_one_pod_has_the_gpus_of_all_its_replicas() -> None:
    def gpus(**values: Any) -> str | None:
        limits = render(mode="plain", **values).pod("server").container("server")["resources"]
        found: str | None = limits["limits"].get("nvidia.com/gpu")
        return found

    assert gpus() == "2"
    assert gpus(draft={"colocate": True}) == "1"
    assert gpus(target={"tensorParallel": 4}, replicas=2) == "10"
    assert gpus(target={"device": "cpu"}) is None
    assert gpus(draft={"device": "cpu"}) == "1"


def test_one_pod_has_all_replicas_and_there_is_never_a_second() -> None:
    rendered = render(mode="plain", replicas=3)
    assert rendered.config("demo-outrider-server")["cluster"]["replicas"] == 3
    assert rendered.one("StatefulSet")["spec"]["replicas"] == 1
    assert render(mode="plain", replicas=0).one("StatefulSet")["spec"]["replicas"] == 0


def test_one_gpu_holds_both_models() -> None:
    config = example("one-gpu").config("demo-outrider-server")
    assert config["cluster"]["colocate"] is True
    container = example("one-gpu").pod("server").container("server")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
