"""The chart as a whole: lint, goldens, and documentation that says what is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import chart_tools
import helm_python
import pytest
import yaml
from chart_tools import CHART, EXAMPLES, example, example_values

from outrider import __version__


@pytest.mark.parametrize("name", EXAMPLES)
def test_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(CHART, example_values(name), strict=True, namespace="llm")
    found = [each["error"] for each in report["messages"] if each["severity"] > 1]
    assert (report["errors"], found) == ([], [])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_renders_what_it_rendered_before(name: str) -> None:
    golden = (chart_tools.GOLDENS / f"{name}.yaml").read_text(encoding="utf-8")
    assert chart_tools.golden_text(name) == golden, "if that is wanted: make helm-golden"


def test_every_example_and_every_golden_is_tested() -> None:
    files = {path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir()}
    assert files == set(EXAMPLES)
    assert {path.stem for path in chart_tools.GOLDENS.iterdir()} == set(EXAMPLES)


def test_the_chart_is_of_this_version() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert metadata["appVersion"] == __version__


def test_the_readme_has_every_value_as_it_is() -> None:
    text = (CHART / "README.md").read_text(encoding="utf-8")
    assert text == chart_tools.readme_text(), "write it anew with: make helm-docs"
    assert len(chart_tools.documented_values()) > 150


def test_the_schema_knows_the_settings_as_they_are() -> None:
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == json.loads(chart_tools.schema_text()), "make helm-docs mends it"


def test_the_schema_has_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    known = {path for path in _paths_of_schema(schema, "") if not path.startswith("config.")}
    documented = {value.path for value in chart_tools.documented_values()}
    assert known - {"global"} == documented | set(_sections(values, documented, ""))


def _paths_of_schema(schema: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        yield path
        if path not in ("tls.certManager.issuerRef",):
            yield from _paths_of_schema(child, f"{path}.")


def _sections(values: dict[str, Any], documented: set[str], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path not in documented:
            yield path
            yield from _sections(value, documented, f"{path}.")


def test_the_dashboard_is_that_of_the_documentation() -> None:
    ours = (CHART / "files" / "dashboard.json").read_bytes()
    assert ours == chart_tools.DASHBOARD.read_bytes(), "copy it with: make helm-docs"


def test_the_chart_packages_without_its_examples(tmp_path: Any) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as packaged:
        names = {each["name"] for each in packaged.files}
    assert {"files/dashboard.json", "files/send_request.py", "files/fetch_models.py"} <= names
    assert not [name for name in names if name.startswith("ci/")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_notes_say_how_to_send_a_request(name: str) -> None:
    notes = example(name).texts["outrider/templates/NOTES.txt"]
    assert "kubectl -n llm port-forward svc/demo-outrider-gateway 8000 50051" in notes
    assert "outrider chat --server" in notes
    assert "<no value>" not in notes and "%!" not in notes


def test_no_template_runs_a_shell() -> None:
    for name in EXAMPLES:
        for pod in example(name).pods:
            for container in pod.spec["containers"]:
                words = [*container.get("command", []), *container.get("args", [])]
                assert not {"sh", "bash", "/bin/sh", "/bin/bash", "-c"} & set(words), pod.owner
