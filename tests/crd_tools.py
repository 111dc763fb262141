"""Custom resource definitions as JSON schemas that know every field and refuse all others."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

CRDS = Path(__file__).resolve().parent / "data" / "crds"


def problems(item: Mapping[str, Any]) -> list[str]:
    """What is wrong with an object of a kind that is kept here."""
    found = _validator(item["apiVersion"], item["kind"]).iter_errors(item)
    return [f"{item['kind']} {error.json_path}: {error.message}" for error in found]


def known_kinds() -> set[tuple[str, str]]:
    return set(_schemas())


@functools.cache
def _validator(api_version: str, kind: str) -> Draft202012Validator:
    return Draft202012Validator(_schemas()[api_version, kind]())


@functools.cache
def _schemas() -> dict[tuple[str, str], Any]:
    """By version and kind; read only when asked for, as they are large."""
    found = {}
    for file in sorted(CRDS.glob("*.yaml.gz")):
        group, _, plural = file.name.removesuffix(".yaml.gz").rpartition("_")
        kind, version = _KINDS[plural]
        found[f"{group}/{version}", kind] = functools.partial(_read, file, version)
    return found


_KINDS = {
    "rayclusters": ("RayCluster", "v1"),
    "grpcroutes": ("GRPCRoute", "v1"),
    "httproutes": ("HTTPRoute", "v1"),
    "scaledobjects": ("ScaledObject", "v1alpha1"),
    "podmonitors": ("PodMonitor", "v1"),
    "servicemonitors": ("ServiceMonitor", "v1"),
    "prometheusrules": ("PrometheusRule", "v1"),
}


def _read(file: Path, version: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load(gzip.decompress(file.read_bytes()), Loader=loader)
    (found,) = (v for v in definition["spec"]["versions"] if v["name"] == version)
    schema: dict[str, Any] = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    _close(schema)
    return schema


def _close(schema: dict[str, Any]) -> None:
    """As the API server prunes: a field that is not named does not exist."""
    if schema.pop("x-kubernetes-int-or-string", False):
        schema["type"] = ["integer", "string"]
        schema.pop("anyOf", None)
    if schema.pop("nullable", False) and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    keeps_all = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in schema and not keeps_all:
        schema.setdefault("additionalProperties", False)
    for child in schema.get("properties", {}).values():
        _close(child)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            _close(schema[key])
