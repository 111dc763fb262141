"""vLLM's and production-stack's dashboards have data of a server of ours that has answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from keyed_server import server_with_keys
from metrics_tools import read_page
from promql import Expression, Series

from outrider.client import Client

pytestmark = [pytest.mark.model]

ROOT = Path(__file__).resolve().parents[2]
EXPRESSIONS = json.loads((ROOT / "tests/data/dashboards/expressions.json").read_text())
DOCUMENT = (ROOT / "docs/metrics.md").read_text()
MODEL = "smollm2-135m-draft"


def _target_labels() -> dict[str, str]:
    """What Prometheus puts on, scraping as the documentation says."""
    (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", DOCUMENT, re.DOTALL)
    (config,) = yaml.safe_load(block)["scrape_configs"]
    (static,) = config["static_configs"]
    labels: dict[str, str] = static["labels"]
    return labels | {"job": config["job_name"], "instance": static["targets"][0]}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Series]]:
    folder = tmp_path_factory.mktemp("dashboards")
    with server_with_keys(folder, {"user": ""}, {"draft.model": MODEL}) as server:
        with Client(server.grpc_address, api_key="user") as client:
            client.wait_ready(60)
            for number in range(4):
                client.generate("Once upon a time", max_tokens=8 + number, seed=number)
        page = read_page(server.http_address, "user")
    target = _target_labels()
    found = [(name, dict(labels) | target) for (name, labels) in page.values]
    yield [*found, ("up", target)]


def _variables(series: list[Series]) -> dict[str, str]:
    """As Grafana fills them in: what `label_values` gives, and the ends of the page."""
    (model,) = {labels["model_name"] for _, labels in series if "model_name" in labels}
    target = _target_labels()
    return {
        **dict.fromkeys(("model_name", "Deployment_id", "MODEL"), model),
        **{"NS": target["namespace"], "SVC": target["service"]},
    }


def _without_data(series: list[Series], dashboards: Any) -> tuple[int, dict[str, list[str]]]:
    """How many expressions there are, and which of them select something that is not there."""
    variables, empty, count = _variables(series), {}, 0
    for dashboard in dashboards:
        for text in dashboard["expressions"]:
            count += 1
            if missing := Expression(text, variables).missing(series):
                empty[text] = missing
    return count, empty


def test_grafanas_dashboards_have_data_for_all_expressions_but_the_routers_own(
    series: list[Series],
) -> None:
    grafana = [each for each in EXPRESSIONS["dashboards"] if each["path"].endswith(".json")]
    count, empty = _without_data(series, grafana)
    assert (count, count - len(empty)) == (103, 100), empty
    listed = re.findall(r"^\| `(\w+)` \| .*production-stack", DOCUMENT, re.MULTILINE)
    assert {name for names in empty.values() for name in names} == set(listed)


def test_perses_dashboards_have_data_for_all_expressions(series: list[Series]) -> None:
    perses = [each for each in EXPRESSIONS["dashboards"] if each["path"].endswith(".yaml")]
    assert _without_data(series, perses) == (43, {})


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ('sum by (le) (rate(a_bucket{x="1"}[5m]))', []),
        ('a{x="2"}', ["a"]),
        ('a{x=~"1|2"}', []),
        ('a{x!="1"}', ["a"]),
        ("sum by (y) (a)", ["a"]),
        ("a / b", ["a", "b"]),
        ("sum(a) / sum(b)", []),
        ("sum(nothing) or vector(0)", ["nothing"]),
    ],
)
def test_an_expression_misses_what_no_series_answers(text: str, missing: list[str]) -> None:
    series = [("a_bucket", {"x": "1", "le": "1"}), ("a", {"x": "1"}), ("b", {"x": "2"})]
    assert Expression(text, {}).missing(series) == missing
