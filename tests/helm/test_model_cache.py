"""Where weights are kept, and who downloads them."""

from __future__ import annotations

from typing import Any

import pytest
from chart_tools import render


def models_volume(component: str, **values: Any) -> dict[str, Any]:
    volumes = render(**values).pod(component).spec["volumes"]
    found: dict[str, Any] = next(each for each in volumes if each["name"] == "models")
    return found


@pytest.mark.parametrize("component", ["gateway", "controller", "target", "draft"])
def test_the_cache_of_models_is_where_it_was_put(component: str) -> None:
    assert models_volume(component)["emptyDir"] == {}
    claim = models_volume(component, modelCache={"type": "pvc"})
    assert claim["persistentVolumeClaim"] == {"claimName": "demo-outrider-models"}
    given = models_volume(component, modelCache={"type": "pvc", "existingClaim": "theirs"})
    assert given["persistentVolumeClaim"] == {"claimName": "theirs"}
    path = models_volume(component, modelCache={"type": "hostPath", "hostPath": "/data"})
    assert path["hostPath"]["path"] == "/data"


def test_gateways_can_do_without_the_cache() -> None:
    cache = {"type": "pvc", "mountInGateways": False}
    assert models_volume("gateway", modelCache=cache)["emptyDir"] == {}
    assert "persistentVolumeClaim" in models_volume("target", modelCache=cache)


def test_caches_of_the_hub_and_ours_are_in_the_cache() -> None:
    rendered = render(modelCache={"mountPath": "/cache"})
    env = {e["name"]: e.get("value") for e in rendered.pod("target").container("target")["env"]}
    assert env["HF_HOME"] == "/cache/hub" and env["OUTRIDER_CACHE"] == "/cache/outrider"


def test_a_claim_outlives_the_release() -> None:
    cache = {"type": "pvc", "size": "1Ti", "storageClassName": "fast"}
    claim = render(modelCache=cache).one("PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Ti"
    given = render(modelCache={"type": "pvc", "existingClaim": "theirs"})
    assert given.of("model-cache.yaml") == []


def test_other_models_are_downloaded_by_another_job() -> None:
    def job(**values: Any) -> str:
        cache = {"type": "pvc", "prefetch": {"enabled": True}}
        rendered = render(modelCache=cache, draft={"method": "ngram"}, **values)
        return str(rendered.of("model-prefetch.yaml")[-1]["metadata"]["name"])

    assert job(model="a/b") != job(model="a/c")
    assert job(model="a/b") == job(model="a/b", replicas=4)
