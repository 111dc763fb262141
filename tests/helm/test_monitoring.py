"""Monitors, alarms, autoscaling and the dashboard ask for what is there to be asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from chart_tools import CHART, ROOT, example, render

from outrider.gateway.metrics.names import METRICS, MetricKind

SUFFIXES = ("_bucket", "_sum", "_count")


def series_names() -> set[str]:
    """As queries name them."""
    names = {each.sample_name for each in METRICS if each.kind is not MetricKind.HISTOGRAM}
    histograms = [each.sample_name for each in METRICS if each.kind is MetricKind.HISTOGRAM]
    return names | {name + suffix for name in histograms for suffix in SUFFIXES}


def used(query: str) -> set[str]:
    return set(re.findall(r"outrider:\w+", query))


def rules() -> dict[str, dict[str, Any]]:
    (group,) = example("production").one("PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_alarms_ask_for_metrics_there_are() -> None:
    for name, rule in rules().items():
        assert used(rule["expr"]) and used(rule["expr"]) <= series_names(), name


def test_alarms_tell_apart_by_labels_that_their_metrics_have() -> None:
    labels = {each.sample_name: set(each.labels) for each in METRICS}
    for name, rule in rules().items():
        told = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        for group in re.findall(r"by \(([\w, ]+)\)", rule["expr"]):
            assert told <= set(group.split(", ")), name
            for metric in used(rule["expr"]):
                assert set(group.split(", ")) <= labels[metric], name


def test_the_documentation_has_every_alarm_with_the_expression_of_the_chart() -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"(?m)^## (Outrider\w+)\n\n```promql\n(.*?)```", text, re.DOTALL))
    found = rules()
    assert {name: plain(expression) for name, expression in documented.items()} == {
        name: plain(rule["expr"]) for name, rule in found.items()
    }


def plain(expression: str) -> str:
    """Without the labels of a release."""
    return " ".join(re.sub(r"\{namespace=[^}]*\}", "", expression).split())


@pytest.mark.parametrize(
    ("alarm", "metric"),
    [
        ("OutriderEngineAway", "outrider:engine_up"),
        ("OutriderReplicaDown", "outrider:engine_up"),
        ("OutriderReplicasMissing", "outrider:replicas_ready"),
        ("OutriderDraftDown", "outrider:draft_up"),
        ("OutriderAcceptanceCollapse", "outrider:spec_decode_num_accepted_tokens_total"),
        ("OutriderQueueGrowth", "outrider:num_requests_waiting"),
        ("OutriderRestarts", "outrider:engine_restarts_total"),
        ("OutriderDraftRestarts", "outrider:draft_restarts_total"),
        ("OutriderKvPressure", "outrider:kv_cache_usage_perc"),
        ("OutriderGatewaysGone", "outrider:active_requests"),
    ],
)
def test_an_alarm_rings_for_each_thing_that_goes_wrong(alarm: str, metric: str) -> None:
    rule = rules()[alarm]
    assert metric in used(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_thresholds_of_alarms_can_be_set() -> None:
    chosen = {"enabled": True, "acceptance": 0.35, "waiting": 7, "restarts": 5, "kvUsage": 0.8}
    (group,) = render(metrics={"rules": chosen}).one("PrometheusRule")["spec"]["groups"]
    found = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert found["OutriderAcceptanceCollapse"].endswith("< 0.35")
    assert found["OutriderQueueGrowth"].endswith("> 7")
    assert found["OutriderRestarts"].endswith("> 5")
    assert found["OutriderKvPressure"].endswith("> 0.8")


def test_alarms_are_about_this_release_alone() -> None:
    for rule in rules().values():
        assert rule["expr"].count('{namespace="llm",pod=~"demo-outrider-gateway-.*"}') >= 1
    plain = render(mode="plain", metrics={"rules": {"enabled": True}})
    (group,) = plain.one("PrometheusRule")["spec"]["groups"]
    assert 'pod=~"demo-outrider-server-.*"' in group["rules"][0]["expr"]


def test_keda_asks_for_a_metric_there_is_unless_told_another() -> None:
    (trigger,) = example("multi-replica").one("ScaledObject")["spec"]["triggers"]
    assert used(trigger["metadata"]["query"]) <= series_names()
    assert used(trigger["metadata"]["query"]) == {"outrider:active_requests"}
    keda = {
        "enabled": True,
        "prometheusAddress": "http://p",
        "query": "up",
        "requestsPerGateway": 9,
    }
    (trigger,) = render(keda=keda).one("ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == "up" and trigger["metadata"]["threshold"] == "9"


def test_a_missing_replica_is_one_of_the_release_or_of_a_controller() -> None:
    """Whose controller is gone is in no metric."""
    chosen = {"enabled": True, "missingFor": "7m"}
    (group,) = render(replicas=5, metrics={"rules": chosen}).one("PrometheusRule")["spec"]["groups"]
    rule = next(rule for rule in group["rules"] if rule["alert"] == "OutriderReplicasMissing")
    assert plain(rule["expr"]) == (
        "max(outrider:replicas_ready) < clamp_min(max(outrider:replicas_configured), 5)"
    )
    assert rule["for"] == "7m"


def test_monitors_label_series_with_the_release_that_the_dashboard_asks_for() -> None:
    on = {"enabled": True}
    rendered = render(metrics={"podMonitor": on, "serviceMonitor": on})
    (pods,) = rendered.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    (services,) = rendered.one("ServiceMonitor")["spec"]["endpoints"]
    assert pods["relabelings"] == services["relabelings"]
    labels = {each["targetLabel"]: each["replacement"] for each in pods["relabelings"]}
    assert labels == {"namespace": "llm", "release": "demo"}
    variables = json.loads((CHART / "files" / "dashboard.json").read_text())["templating"]["list"]
    assert set(labels) < {each["name"] for each in variables}


@pytest.mark.parametrize("mode", ["kuberay", "plain"])
def test_monitors_ask_the_admin_port_of_whoever_meets_clients(mode: str) -> None:
    on = {"enabled": True}
    rendered = render(mode=mode, metrics={"podMonitor": on, "serviceMonitor": on})
    pod = rendered.pod("gateway" if mode == "kuberay" else "server")
    monitor = rendered.one("PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= pod.labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] == "admin"
    service = rendered.one("Service", "demo-outrider-metrics")
    assert service["spec"]["selector"].items() <= pod.labels.items()
    selector = rendered.one("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= service["metadata"]["labels"].items()
    assert rendered.one("ServiceMonitor")["spec"]["endpoints"][0]["port"] == "admin"


def test_the_dashboard_is_found_by_its_label() -> None:
    item = example("production").one("ConfigMap", "demo-outrider-dashboard")
    assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert item["data"]["outrider.json"].rstrip() == (
        (CHART / "files" / "dashboard.json").read_text(encoding="utf-8").rstrip()
    )
