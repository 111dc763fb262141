"""Wrong values are refused before anything is installed, with what to change."""

from __future__ import annotations

from typing import Any

import pytest
from chart_tools import BASE, merged, refusal, render


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"replica": 2}, "'replica' not allowed"),
        ({"draft": {"mdoel": "x"}}, "at '/draft': additional properties 'mdoel'"),
        ({"gateway": {"resources": {"limit": {}}}}, "'limit' not allowed"),
        ({"metrics": {"rules": {"acceptence": 0.1}}}, "'acceptence' not allowed"),
        ({"config": {"targt": {}}}, "at '/config': additional properties 'targt'"),
        ({"config": {"cache": {"blocksize": 32}}}, "at '/config/cache'"),
        ({"upgrade": {"previous": {"imag": {}}}}, "at '/upgrade/previous'"),
        ({"gateway": {"extraEnv": [{"nam": "A"}]}}, "at '/gateway/extraEnv/0'"),
    ],
)
def test_a_typo_is_refused_with_its_place(values: dict[str, Any], place: str) -> None:
    assert place in refusal(values)


@pytest.mark.parametrize(
    "path",
    [
        "replicas",
        "target.tensorParallel",
        "target.nodes",
        "target.maxModelLen",
        "draft.numSpeculativeTokens",
        "engine.drainSeconds",
        "engine.startTimeoutSeconds",
        "upgrade.handoverSeconds",
        "upgrade.partition",
        "gateway.replicas",
        "gateway.preStopSeconds",
        "gateway.maxConnectionAgeSeconds",
        "service.httpPort",
        "autoscaling.minReplicas",
        "keda.requestsPerGateway",
        "probes.periodSeconds",
        "metrics.rules.waiting",
        "metrics.rules.acceptance",
        "tests.timeoutSeconds",
    ],
)
def test_a_negative_number_is_refused(path: str) -> None:
    assert f"at '/{path.replace('.', '/')}': minimum: got -1" in refusal(_at(path, -1))


def _at(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    found: dict[str, Any] = value
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mode", "docker"),
        ("draft.method", "eagle"),
        ("draft.policy", "fast"),
        ("target.device", "tpu"),
        ("target.dtype", "int4"),
        ("image.digest", "abc"),
        ("image.tag", 0.2),
        ("engine.sharedMemory", "2 GB"),
        ("modelCache.type", "nfs"),
        ("modelCache.mountPath", "models"),
        ("ray.version", "2.60"),
        ("fullnameOverride", "1st"),
        ("metrics.rules.kvUsage", 95),
        ("gateway.resources.limits.memory", "lots"),
    ],
)
def test_a_value_outside_its_range_is_refused(path: str, value: Any) -> None:
    assert f"at '/{path.replace('.', '/')}'" in refusal(_at(path, value))


def test_an_image_that_is_not_named_is_refused_with_the_command_that_builds_it() -> None:
    told = refusal({"image": {"repository": ""}})
    assert "image.repository is not set" in told
    assert "docker build -f docker/engine.Dockerfile -t REGISTRY/outrider-engine:" in told
    told = refusal({"gateway": {"image": {"repository": ""}}})
    assert "gateway.image.repository is not set" in told
    assert "docker build -f docker/gateway.Dockerfile" in told


def test_plain_mode_needs_no_image_of_gateways() -> None:
    assert render(mode="plain", gateway={"image": {"repository": ""}}).all("StatefulSet")


def test_the_tag_latest_is_refused() -> None:
    assert "another image every day" in refusal({"image": {"tag": "latest"}})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no draft for a model": (
        {"model": "owner/name"},
        "draft.model is not set, and there is no bundled draft for the model",
    ),
    "ranks that cannot be divided": (
        {"target": {"tensorParallel": 4, "nodes": 3}},
        "target.tensorParallel is 4, which cannot be divided evenly over target.nodes (3)",
    ),
    "colocation of several ranks": (
        {"target": {"tensorParallel": 2}, "draft": {"colocate": True}},
        "draft.colocate is true, which takes target.tensorParallel 1",
    ),
    "keys of two kinds": (
        {"auth": {"existingSecret": "a", "keysSecret": "b"}},
        "auth.existingSecret and auth.keysSecret are both set",
    ),
    "keys for nobody": (
        {"auth": {"existingSecret": "a", "anonymous": True}},
        "auth.anonymous is true beside a Secret of keys",
    ),
    "a key in a ConfigMap": (
        {"config": {"server": {"api_key": "k"}}},
        "config.server.api_key would be in a ConfigMap",
    ),
    "TLS without a certificate": ({"tls": {"enabled": True}}, "there is no certificate"),
    "two certificates": (
        {
            "tls": {
                "enabled": True,
                "existingSecret": "a",
                "certManager": {"enabled": True, "issuerRef": {"name": "b"}},
            }
        },
        "tls.existingSecret and tls.certManager.enabled are both set",
    ),
    "an issuer without a name": (
        {"tls": {"enabled": True, "certManager": {"enabled": True}}},
        "tls.certManager.issuerRef.name is not set",
    ),
    "a folder without a path": (
        {"modelCache": {"type": "hostPath"}},
        "modelCache.hostPath is not set",
    ),
    "downloading into nothing": (
        {"modelCache": {"prefetch": {"enabled": True}}},
        "modelCache.type is emptyDir",
    ),
    "an Ingress without a host": ({"ingress": {"enabled": True}}, "ingress.host is not set"),
    "routes without a Gateway": (
        {"gatewayApi": {"enabled": True, "hostnames": ["a"]}},
        "gatewayApi.parentRefs is empty",
    ),
    "two autoscalers": (
        {
            "autoscaling": {"enabled": True},
            "keda": {"enabled": True, "prometheusAddress": "http://p"},
        },
        "both would scale the gateways",
    ),
    "a range upside down": (
        {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}},
        "autoscaling.maxReplicas is 2, below autoscaling.minReplicas (5)",
    ),
    "KEDA without Prometheus": ({"keda": {"enabled": True}}, "keda.prometheusAddress is not set"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_do_not_go_together_are_refused(case: str) -> None:
    values, sentence = REFUSED[case]
    assert sentence in refusal(values)


def test_a_release_that_begins_with_a_digit_is_refused() -> None:
    import helm_python
    from chart_tools import chart

    with pytest.raises(helm_python.HelmRenderError, match="must begin with a letter"):
        chart().render(merged(BASE, {}), name="1st", namespace="llm")


@pytest.mark.parametrize("length", [1, 20, 53])
def test_names_stay_within_the_limits_of_kubernetes(length: int) -> None:
    from chart_tools import Rendered, chart

    values = merged(BASE, {"replicas": 3, "modelCache": {"type": "pvc"}})
    rendered = Rendered(chart().render(values, name="r" * length, namespace="llm"))
    for item in rendered.objects:
        limit = 53 if item["kind"] == "RayCluster" else 63
        assert len(item["metadata"]["name"]) <= limit
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(set(names)) == len(names)
