"""The dashboard and the documentation name the metrics there are, and the page has them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import fake_desk
from metrics_tools import Page

from outrider.gateway.metrics.engines import (
    engine_families,
    number_families,
    numbers_of,
    replica_counts,
)
from outrider.gateway.metrics.names import METRICS, MetricKind
from outrider.gateway.metrics.page import page_of
from outrider.gateway.metrics.requests import (
    FINISH_REASONS,
    REFUSAL_REASONS,
    RESUME_REASONS,
    GatewayMetrics,
)
from outrider.links.cluster_view import ClusterView, ReplicaView
from outrider.links.gateway_messages import (
    EngineCounters,
    EngineStatus,
    ModelStatus,
    ProposerCounters,
)
from outrider.scheduler.types import STEP_TOKENS

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "docs/grafana/outrider.json"
DOCUMENT = ROOT / "docs/metrics.md"
NAME = re.compile(r"\b(?:outrider|vllm):\w+")
# Labels that the chart's monitors give to all series of a release.
RELEASE = ("namespace", "release")
ROWS = ("Traffic", "Latency", "Speculation", "Engine", "Gateway")


@pytest.fixture(scope="module")
def page() -> Page:
    """Of a server that has everything there is to tell."""
    metrics = GatewayMetrics()
    metrics.of("m")
    counters = EngineCounters(
        rounds_by_drafted=(1, 2),
        rounds_by_accepted=(1, 2),
        proposers=(ProposerCounters("draft", 3, 2),),
        step_tokens=40,
        steps_by_tokens=(1, 2, *([0] * (len(STEP_TOKENS) - 1))),
    )
    status = EngineStatus(
        *(0, (), "", 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
        models=(ModelStatus("target", 1, "h", "cpu"), ModelStatus("draft", 1, "h", "cpu")),
        speculation=replace(fake_desk().status(), gain=1.5),
        counters=counters,
    )
    replica = ReplicaView("0", "serving", 0, 0, placement_s=1.0, start_s=2.0)
    view = ClusterView("c", "serving", 0, 0, (), (replica,), num_configured=1)
    families = (
        *metrics.registry.collect(),
        *number_families(numbers_of(view)),
        *engine_families("m", replica_counts({"0": status}, view)),
    )
    return Page(page_of(families, with_vllm=True).decode())


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_page_has_every_metric_with_its_kind_help_and_labels(page: Page) -> None:
    for each in METRICS:
        for name in (each.full_name, *each.vllm_names):
            family = page.families[name]
            assert (family.type, family.documentation) == (each.kind.value, each.text)
        labels = {
            label for sample in page.families[each.full_name].samples for label in sample.labels
        }
        assert labels - {"le"} == set(each.labels), each.name
    ours = {name for name in page.families if name.startswith("outrider:")}
    assert ours == {each.full_name for each in METRICS}


def test_every_metric_the_dashboard_queries_is_on_the_page(page: Page) -> None:
    named = {name for query in queries() for name in NAME.findall(query)}
    assert named and named <= page.names


def test_the_dashboard_shows_every_metric() -> None:
    asked = " ".join(queries())
    assert [each.name for each in METRICS if each.sample_name not in asked] == []


def test_the_dashboard_groups_by_labels_that_its_metrics_have(page: Page) -> None:
    labels_of = {each.full_name: {*each.labels, "le", *RELEASE} for each in METRICS}
    labels_of |= {each.sample_name: labels_of[each.full_name] for each in METRICS}
    for query in queries():
        for labels, rest in re.findall(r"(?:sum|max) by \(([\w, ]+)\) (?=\((.*))", query):
            name = NAME.findall(rest)[0].removesuffix("_bucket")
            assert set(labels.split(", ")) <= labels_of[name], query
        for name, selector in re.findall(
            r"(outrider:\w+?)(?:_bucket|_sum|_count)?(\{[^}]*\})", query
        ):
            labels = [each for each in ("model", *RELEASE) if each in labels_of[name]]
            asked = ",".join(f'{each}=~"${each}"' for each in labels)
            assert selector == "{" + asked + "}", query


def test_the_dashboard_adds_up_no_replicas_of_several_releases_as_one() -> None:
    """Each release numbers its replicas from 0."""
    for query in queries():
        for labels in re.findall(r"by \(([\w, ]+)\)", query):
            assert "replica" not in labels.split(", ") or set(RELEASE) < set(labels.split(", "))
        assert query.count("outrider:") == query.count(
            'namespace=~"$namespace",release=~"$release"}'
        )


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    every = dashboard["panels"]
    assert tuple(panel["title"] for panel in every if panel["type"] == "row") == ROWS
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for query in queries():
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    assert variables == {"datasource", *RELEASE, "model"}


def test_the_documentation_has_every_metric_as_it_is() -> None:
    rows = re.findall(r"^\| `(outrider:\w+)` \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    found = {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in rows}
    assert len(found) == len(rows)
    assert found == {
        each.sample_name: [
            each.kind.value,
            ", ".join(f"`{label}`" for label in each.labels) or "-",
            each.source.value,
            each.text,
            ", ".join(f"`{name}`" for name in _vllm_names(each)) or "-",
        ]
        for each in METRICS
    }


def _vllm_names(each: Any) -> Iterator[str]:
    for name in each.vllm_names:
        yield name + ("_total" if each.kind is MetricKind.COUNTER else "")


def test_the_documentation_queries_what_there_is_and_lists_every_reason(page: Page) -> None:
    text = DOCUMENT.read_text()
    (promql,) = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    assert set(NAME.findall(promql)) <= page.names
    for label, reasons in (
        ("request_success", FINISH_REASONS),
        ("refused_requests", REFUSAL_REASONS),
        ("resumed_requests", RESUME_REASONS),
    ):
        (line,) = re.findall(rf"^\| `reason` of `{label}` \| (.*) \|$", text, re.MULTILINE)
        assert tuple(re.findall(r"`(\w+)`", line)) == reasons


ALARMS = (
    *("OutriderEngineAway", "OutriderDraftDown", "OutriderAcceptanceCollapse"),
    *("OutriderQueueGrowth", "OutriderRestarts", "OutriderKvPressure"),
)


def test_every_alarm_has_a_heading_an_expression_and_what_to_do(page: Page) -> None:
    text = (ROOT / "docs/operating.md").read_text()
    for alarm in ALARMS:
        (section,) = re.findall(rf"^## {alarm}\n(.*?)(?=^#)", text, re.MULTILINE | re.DOTALL)
        assert "```promql" in section and "\n1. " in section, alarm
    promql = "".join(re.findall(r"```promql\n(.*?)```", text, re.DOTALL))
    named = set(NAME.findall(promql))
    assert named and named <= page.names


def test_every_alarm_of_the_chart_is_explained() -> None:
    chart = ROOT / "helm/outrider/templates"
    rules = "".join(file.read_text() for file in chart.rglob("*.yaml")) if chart.is_dir() else ""
    rung = set(re.findall(r"- alert: (\w+)", rules))
    documented = set(
        re.findall(r"^## (Outrider\w+)$", (ROOT / "docs/operating.md").read_text(), re.M)
    )
    assert rung <= documented
