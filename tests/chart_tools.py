"""The chart, rendered by Helm itself, and what is made of it.

`python tests/chart_tools.py golden` writes the goldens anew; `docs` the chart's table of values,
the names of settings in its schema, and its copy of the dashboard.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "outrider"
EXAMPLES = ("one-gpu", "four-plus-one", "multi-replica", "cpu-demo", "production")
RELEASE, NAMESPACE = "demo", "llm"
DASHBOARD = ROOT / "docs" / "grafana" / "outrider.json"
GOLDENS = ROOT / "tests" / "data" / "helm"
# The least that renders.
BASE: Mapping[str, Any] = {
    "image": {"repository": "registry.example/outrider-engine"},
    "gateway": {"image": {"repository": "registry.example/outrider-gateway"}},
}
_RANDOM = re.compile(r"(?m)^(  (?:secret|auth_token|api-key): )\S{64}$")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where there is one
_TABLE_BEGINS = "<!-- values: made by `make helm-docs` -->"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that an object asks for."""

    owner: str  # kind and name
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    def container(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(c for c in self.spec["containers"] if c["name"] == name)
        return found


@dataclass(frozen=True)
class Rendered:
    """What a release would be. Its objects are nobody's to change."""

    texts: dict[str, str]  # by template, as it is named in the chart

    def of(self, template: str) -> list[dict[str, Any]]:
        """The objects of one template."""
        text = self.texts[f"outrider/templates/{template}"]
        return [each for each in yaml.load_all(text, Loader=_LOADER) if each is not None]

    @functools.cached_property
    def objects(self) -> list[dict[str, Any]]:
        names = [name.removeprefix("outrider/templates/") for name in sorted(self.texts)]
        return [each for name in names if name.endswith(".yaml") for each in self.of(name)]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> dict[str, Any]:
        (found,) = (e for e in self.all(kind) if name in (None, e["metadata"]["name"]))
        return found

    @functools.cached_property
    def pods(self) -> list[Pod]:
        return [pod for each in self.objects for pod in _pods_of(each)]

    def pod(self, component: str) -> Pod:
        """Any of that component; those of several replicas are alike."""
        return next(each for each in self.pods if each.component == component)

    def config(self, config_map: str) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.config_text(config_map))
        return found

    def config_text(self, config_map: str) -> str:
        text: str = self.one("ConfigMap", config_map)["data"]["config.yaml"]
        return text


def _pods_of(item: Mapping[str, Any]) -> Iterator[Pod]:
    owner = f"{item['kind']} {item['metadata']['name']}"
    if item["kind"] == "Pod":
        yield Pod(owner, item["metadata"]["labels"], item["spec"])
    elif item["kind"] in ("Deployment", "StatefulSet", "Job"):
        yield _pod(owner, item["spec"]["template"])
    elif item["kind"] == "RayCluster":
        yield _pod(owner, item["spec"]["headGroupSpec"]["template"])
        for group in item["spec"]["workerGroupSpecs"]:
            yield _pod(owner, group["template"])


def _pod(owner: str, template: Mapping[str, Any]) -> Pod:
    return Pod(owner, template["metadata"]["labels"], template["spec"])


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def example_values(name: str) -> dict[str, Any]:
    text = (CHART / "ci" / f"{name}-values.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@functools.cache
def example(name: str) -> Rendered:
    return _rendered(example_values(name))


def render(values: Mapping[str, Any] | None = None, **more: Any) -> Rendered:
    """With these values over the least that renders."""
    return _rendered(merged(merged(BASE, values or {}), more))


def _rendered(values: dict[str, Any]) -> Rendered:
    return _rendered_once(json.dumps(values, sort_keys=True))


@functools.cache
def _rendered_once(values: str) -> Rendered:
    return Rendered(chart().render(json.loads(values), name=RELEASE, namespace=NAMESPACE))


def refusal(values: Mapping[str, Any] | None = None, *, over_base: bool = True) -> str:
    """What Helm says of values that it must not take."""
    given = merged(BASE, values or {}) if over_base else dict(values or {})
    try:
        _rendered(given)
    except helm_python.HelmError as error:
        return str(error)
    raise AssertionError(f"{values} should be refused")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges values."""
    result: dict[str, Any] = copy.deepcopy(dict(base))
    for key, value in over.items():
        before = result.get(key)
        both = isinstance(before, dict) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both and before is not None else value
    return result


# -- goldens ----------------------------------------------------------------------------------


def golden_text(name: str) -> str:
    """All objects of an example, secrets that were drawn left out."""
    texts = example(name).texts
    shown = [f"# {n}\n{texts[n].strip()}\n" for n in sorted(texts) if texts[n].strip()]
    return _RANDOM.sub(r"\1(random)", "\n".join(shown))


# -- documentation ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    path: str
    default: str  # as JSON
    text: str


def documented_values() -> list[Value]:
    """Those of values.yaml that have a line `# --`; what has none must be a section."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return list(_values_in(root, text.splitlines(), ""))


def _values_in(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        path = f"{prefix}{key.value}"
        above = lines[key.start_mark.line - 1].strip()
        if above.startswith("# -- "):
            default = yaml.safe_load(yaml.serialize(child))
            yield Value(path, json.dumps(default), above.removeprefix("# -- "))
        elif isinstance(child, yaml.MappingNode) and child.value:
            yield from _values_in(child, lines, f"{path}.")
        else:
            raise ValueError(f"values.yaml: {path} has no line '# -- ' above it")


def readme_text() -> str:
    """The chart's README with its table of values made anew."""
    intro, found, _ = (CHART / "README.md").read_text(encoding="utf-8").partition(_TABLE_BEGINS)
    assert found, f"README.md of the chart has no line {_TABLE_BEGINS}"
    rows = [f"| `{v.path}` | `{v.default}` | {v.text} |" for v in documented_values()]
    head = ["| value | default | meaning |", "|---|---|---|"]
    return "\n".join([f"{intro}{_TABLE_BEGINS}", "", *head, *rows, ""])


def schema_text() -> str:
    """The schema of values with the settings of `config` as they are now."""
    from outrider.config import SECTIONS, settings

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    fields: dict[str, Any] = {s: _closed({}) for s in SECTIONS}
    for path in settings():
        section, _, name = path.rpartition(".")
        (fields[section]["properties"] if section else fields)[name] = {}
    schema["properties"]["config"] = _closed(fields)
    return json.dumps(schema, indent=2) + "\n"


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def main(what: str) -> None:
    if what == "golden":
        GOLDENS.mkdir(parents=True, exist_ok=True)
        for name in EXAMPLES:
            (GOLDENS / f"{name}.yaml").write_text(golden_text(name), encoding="utf-8")
    elif what == "docs":
        (CHART / "README.md").write_text(readme_text(), encoding="utf-8")
        (CHART / "values.schema.json").write_text(schema_text(), encoding="utf-8")
        (CHART / "files" / "dashboard.json").write_bytes(DASHBOARD.read_bytes())
    else:
        sys.exit(f"there is no {what!r}; it is golden or docs.")


if __name__ == "__main__":
    main(*sys.argv[1:])
