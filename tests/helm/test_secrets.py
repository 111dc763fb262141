"""Keys, tokens, certificates: given or made, and where they reach."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from chart_tools import Rendered, render

GATEWAY = "demo-outrider-gateway"


def variables(rendered: Rendered, component: str, container: str) -> dict[str, Any]:
    env = rendered.pod(component).container(container)["env"]
    return {e["name"]: e.get("value", e.get("valueFrom", {}).get("secretKeyRef")) for e in env}


def test_what_is_not_given_is_drawn() -> None:
    data = render().one("Secret")["data"]
    assert set(data) == {"secret", "auth_token", "api-key"}
    drawn = [base64.b64decode(value) for value in data.values()]
    assert all(len(value) == 48 for value in drawn) and len(set(drawn)) == 3


def test_what_is_given_is_not_drawn() -> None:
    given: dict[str, Any] = {
        "link": {"existingSecret": "a"},
        "ray": {"existingSecret": "b"},
        "auth": {"existingSecret": "c"},
    }
    assert render(given).of("secrets.yaml") == []
    one_missing = {**given, "ray": {}}
    assert set(render(one_missing).one("Secret")["data"]) == {"auth_token"}


def test_plain_mode_draws_no_token_for_ray() -> None:
    assert set(render(mode="plain").one("Secret")["data"]) == {"secret", "api-key"}


def test_all_processes_share_the_secret_of_the_links() -> None:
    rendered = render(link={"existingSecret": "link"})
    for component, container in (
        ("gateway", "gateway"),
        ("controller", "controller"),
        ("controller", "ray-head"),
        ("target", "target"),
        ("draft", "draft"),
    ):
        found = variables(rendered, component, container)["OUTRIDER_SECRET"]
        assert found == {"name": "link", "key": "secret"}


def test_only_gateways_know_the_key_of_clients() -> None:
    rendered = render(auth={"existingSecret": "keys"})
    key = {"name": "keys", "key": "api-key"}
    assert variables(rendered, "gateway", "gateway")["OUTRIDER_API_KEY"] == key
    for component, container in (("controller", "controller"), ("target", "target")):
        assert "OUTRIDER_API_KEY" not in variables(rendered, component, container)


@pytest.mark.parametrize("mode", ["kuberay", "plain"])
def test_a_file_of_keys_is_mounted_where_the_configuration_looks(mode: str) -> None:
    rendered = render(mode=mode, auth={"keysSecret": "keys"})
    component = "gateway" if mode == "kuberay" else "server"
    name = GATEWAY if mode == "kuberay" else "demo-outrider-server"
    pod = rendered.pod(component)
    assert rendered.config(name)["server"]["api_keys_file"] == "/etc/outrider-keys/keys.yaml"
    assert {"name": "keys", "secret": {"secretName": "keys"}} in pod.spec["volumes"]
    mounts = pod.container(component)["volumeMounts"]
    assert {"name": "keys", "mountPath": "/etc/outrider-keys", "readOnly": True} in mounts
    assert "OUTRIDER_API_KEY" not in variables(rendered, component, component)


def test_anybody_may_come_in_only_if_that_is_said() -> None:
    assert "allow_anonymous" not in render().config(GATEWAY)["server"]
    rendered = render(auth={"anonymous": True})
    assert rendered.config(GATEWAY)["server"]["allow_anonymous"] is True
    assert "api-key" not in rendered.one("Secret")["data"]


def test_the_token_of_the_hub_reaches_whoever_downloads() -> None:
    for hub, secret in (
        ({"existingSecret": "hub"}, "hub"),
        ({"token": "hf_x"}, "demo-outrider-secrets"),
    ):
        rendered = render(hub=hub)
        for component, container in (
            ("gateway", "gateway"),
            ("controller", "controller"),
            ("target", "target"),
        ):
            found = variables(rendered, component, container)["HF_TOKEN"]
            assert found == {"name": secret, "key": "token"}
    data = render(hub={"token": "hf_x"}).one("Secret")["data"]
    assert base64.b64decode(data["token"]) == b"hf_x"
    assert "HF_TOKEN" not in variables(render(), "target", "target")


def test_another_hub_or_none_can_be_chosen() -> None:
    found = variables(
        render(hub={"endpoint": "https://hub.example", "offline": True}), "target", "target"
    )
    assert found["HF_ENDPOINT"] == "https://hub.example" and found["HF_HUB_OFFLINE"] == "1"


def test_no_certificate_is_asked_for_without_tls() -> None:
    rendered = render()
    assert rendered.of("certificate.yaml") == []
    assert not [key for key in rendered.config(GATEWAY)["server"] if key.startswith("tls")]


def test_a_certificate_is_mounted_where_the_configuration_looks() -> None:
    rendered = render(tls={"enabled": True, "existingSecret": "cert", "clientCASecret": "ca"})
    server = rendered.config(GATEWAY)["server"]
    assert server["tls_cert"] == "/etc/outrider-tls/tls.crt"
    assert server["tls_key"] == "/etc/outrider-tls/tls.key"
    assert server["tls_client_ca"] == "/etc/outrider-client-ca/ca.crt"
    pod = rendered.pod("gateway")
    assert {"name": "tls", "secret": {"secretName": "cert"}} in pod.spec["volumes"]
    assert {"name": "client-ca", "secret": {"secretName": "ca"}} in pod.spec["volumes"]
    assert rendered.of("certificate.yaml") == []


def test_cert_manager_makes_one_for_the_names_of_the_services() -> None:
    manager = {
        "enabled": True,
        "issuerRef": {"name": "internal", "kind": "ClusterIssuer"},
        "dnsNames": ["llm.example"],
    }
    rendered = render(tls={"enabled": True, "certManager": manager})
    spec = rendered.one("Certificate")["spec"]
    assert spec["issuerRef"] == manager["issuerRef"]
    assert {f"{GATEWAY}.llm.svc", f"{GATEWAY}-headless.llm.svc", "llm.example"} <= set(
        spec["dnsNames"]
    )
    volumes = rendered.pod("gateway").spec["volumes"]
    assert {"name": "tls", "secret": {"secretName": spec["secretName"]}} in volumes
