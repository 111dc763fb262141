"""Each optional object: nothing of it when off, and what it says when on."""

from __future__ import annotations

from typing import Any

import pytest
from chart_tools import CHART, example, render

GATEWAY = "demo-outrider-gateway"
# By template: values that turn it off, where the defaults do not.
OPTIONAL: dict[str, dict[str, Any]] = {
    "autoscaling.yaml": {},
    "certificate.yaml": {},
    "dashboard.yaml": {},
    "disruption.yaml": {"podDisruptionBudget": {"enabled": False}},
    "ingress.yaml": {},
    "keda.yaml": {},
    "model-cache.yaml": {},
    "model-prefetch.yaml": {},
    "monitoring.yaml": {},
    "networkpolicy.yaml": {},
    "routes.yaml": {},
    "rules.yaml": {},
    "serviceaccount.yaml": {"serviceAccount": {"create": False}},
    "tests/request.yaml": {"tests": {"enabled": False}},
    "upgrade.yaml": {"upgrade": {"gate": False}},
}
# Tested elsewhere, each also where it renders nothing.
CORE = {
    "controllers-service.yaml",
    "gateway-config.yaml",
    "gateway-deployment.yaml",
    "gateway-service.yaml",
    "raycluster.yaml",
    "secrets.yaml",
    "statefulset.yaml",
}


def test_every_template_is_tested() -> None:
    folder = CHART / "templates"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}
    assert files == OPTIONAL.keys() | CORE


@pytest.mark.parametrize("template", OPTIONAL)
def test_an_option_that_is_off_renders_nothing(template: str) -> None:
    assert render(OPTIONAL[template]).of(template) == []


@pytest.mark.parametrize("template", OPTIONAL)
def test_an_option_that_is_on_renders_something(template: str) -> None:
    names = ("production", "multi-replica")
    assert any(example(name).of(template) for name in names)


def test_a_service_account_can_be_somebody_elses() -> None:
    ungated = {"gate": False}  # whose Job has an account of its own
    rendered = render(serviceAccount={"create": False, "name": "theirs"}, upgrade=ungated)
    assert {pod.spec["serviceAccountName"] for pod in rendered.pods} == {"theirs"}
    none = render(serviceAccount={"create": False}, upgrade=ungated)
    assert {pod.spec["serviceAccountName"] for pod in none.pods} == {"default"}


# -- the ways in ----------------------------------------------------------------------------------


def ingresses(**values: Any) -> dict[str, dict[str, Any]]:
    found = render(**values).all("Ingress")
    return {each["metadata"]["name"].rpartition("-")[2]: each for each in found}


def test_streams_pass_an_ingress_unbuffered_and_for_long() -> None:
    found = ingresses(ingress={"enabled": True, "host": "a", "grpcHost": "b"})
    prefix = "nginx.ingress.kubernetes.io/"
    for protocol, backend in (("http", "HTTP"), ("grpc", "GRPC")):
        annotations = found[protocol]["metadata"]["annotations"]
        assert annotations[f"{prefix}proxy-buffering"] == "off"
        assert annotations[f"{prefix}proxy-read-timeout"] == "3600"
        assert annotations[f"{prefix}proxy-send-timeout"] == "3600"
        assert annotations[f"{prefix}backend-protocol"] == backend
        (rule,) = found[protocol]["spec"]["rules"]
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {"name": GATEWAY, "port": {"name": protocol}}


def test_an_ingress_speaks_tls_to_gateways_that_do() -> None:
    tls = {"enabled": True, "existingSecret": "cert"}
    found = ingresses(ingress={"enabled": True, "host": "a", "grpcHost": "b"}, tls=tls)
    name = "nginx.ingress.kubernetes.io/backend-protocol"
    assert found["http"]["metadata"]["annotations"][name] == "HTTPS"
    assert found["grpc"]["metadata"]["annotations"][name] == "GRPCS"


def test_an_ingress_of_another_kind_has_only_its_own_annotations() -> None:
    values = {"enabled": True, "host": "a", "nginxAnnotations": False, "annotations": {"x": "y"}}
    found = ingresses(ingress=values)
    assert set(found) == {"http"}
    assert found["http"]["metadata"]["annotations"] == {"x": "y"}


def test_routes_lead_to_the_ports_of_the_service() -> None:
    rendered = example("production")
    service = rendered.one("Service", GATEWAY)["spec"]
    ports = {port["name"]: port["port"] for port in service["ports"]}
    for kind, protocol in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        (rule,) = rendered.one(kind)["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": GATEWAY, "port": ports[protocol]}]
    (rule,) = rendered.one("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}


def test_only_routes_with_hosts_are_made() -> None:
    api = {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a"]}
    assert [each["kind"] for each in render(gatewayApi=api).of("routes.yaml")] == ["HTTPRoute"]


# -- how many ---------------------------------------------------------------------------------


def test_only_gateways_are_scaled() -> None:
    for name, kind in (
        ("production", "HorizontalPodAutoscaler"),
        ("multi-replica", "ScaledObject"),
    ):
        target = example(name).one(kind)["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("Deployment", GATEWAY)
        assert "replicas" not in example(name).one("Deployment")["spec"]


def test_one_pod_is_not_scaled() -> None:
    rendered = render(
        mode="plain",
        autoscaling={"enabled": True},
        keda={"enabled": True, "prometheusAddress": "http://p"},
    )
    assert rendered.of("autoscaling.yaml") == rendered.of("keda.yaml") == []


def test_gateways_go_one_at_a_time_and_drained() -> None:
    down = example("production").one("HorizontalPodAutoscaler")["spec"]["behavior"]["scaleDown"]
    (policy,) = down["policies"]
    assert (policy["value"], policy["periodSeconds"]) == (1, 130)


def test_all_replicas_but_one_must_stay() -> None:
    def budgets(**values: Any) -> dict[str, dict[str, Any]]:
        found = render(**values).all("PodDisruptionBudget")
        return {each["metadata"]["name"]: each["spec"] for each in found}

    target = {"tensorParallel": 4, "nodes": 2}
    found = budgets(replicas=3, target=target)
    assert found[GATEWAY]["maxUnavailable"] == 1
    assert found["demo-outrider-controller"]["minAvailable"] == 2
    assert found["demo-outrider-target"]["minAvailable"] == 4
    assert set(budgets(replicas=1)) == {GATEWAY}, "one that must stay could never be moved"


def test_budgets_select_the_pods_they_are_for() -> None:
    rendered = render(replicas=2)
    for budget in rendered.all("PodDisruptionBudget"):
        labels = budget["spec"]["selector"]["matchLabels"]
        selected = {p.component for p in rendered.pods if labels.items() <= p.labels.items()}
        assert len(selected) == 1


# -- who may reach whom -----------------------------------------------------------------------


def test_engines_are_reached_by_their_own_release_alone() -> None:
    rendered = example("production")
    policy = rendered.one("NetworkPolicy", "demo-outrider-engines")["spec"]
    (own, metrics) = policy["ingress"]
    (source,) = own["from"]
    (rule,) = source["podSelector"]["matchExpressions"]
    assert set(rule["values"]) == {"controller", "target", "draft", "gateway"}
    assert "ports" not in own, "engines choose theirs"
    assert metrics["ports"] == [{"port": 8080}, {"port": 8081}], "of Ray and of the controller"
    assert metrics["from"] == rendered.one("NetworkPolicy", GATEWAY)["spec"]["ingress"][1]["from"]
    (selected,) = policy["podSelector"]["matchExpressions"]
    engines = {pod.component for pod in rendered.pods if pod.owner.startswith("RayCluster")}
    assert set(selected["values"]) == engines


def test_everybody_reaches_gateways_unless_clients_are_named() -> None:
    def gateway(**policy: Any) -> list[dict[str, Any]]:
        rendered = render(networkPolicy={"enabled": True, **policy})
        found: list[dict[str, Any]] = rendered.one("NetworkPolicy", GATEWAY)["spec"]["ingress"]
        return found

    clients, scrapers = gateway()
    assert "from" not in clients
    assert clients["ports"] == [{"port": "http"}, {"port": "grpc"}]
    assert scrapers == {"ports": [{"port": "admin"}], "from": [{"podSelector": {}}]}
    named = [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]
    assert gateway(clients=named)[0]["from"] == named
    assert gateway(scrapers=named)[1]["from"] == named


def test_the_notes_tell_who_may_scrape_while_nobody_is_named() -> None:
    policy = {"enabled": True}
    monitored = {"podMonitor": {"enabled": True}}
    notes = render(networkPolicy=policy, metrics=monitored).texts["outrider/templates/NOTES.txt"]
    assert "name the namespace of Prometheus in networkPolicy.scrapers" in notes
    assert (
        "networkPolicy.scrapers" not in example("production").texts["outrider/templates/NOTES.txt"]
    )
