"""The programs that the chart carries, run."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chart_tools import CHART, example, render
from fake_engine import fake_service

from outrider.errors import OutriderError


def program(name: str) -> Callable[..., None]:
    found: Callable[..., None] = runpy.run_path(str(CHART / "files" / name))["main"]
    return found


def test_the_test_of_a_release_sends_a_request_and_has_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "a-key")
    with fake_service(tmp_path, server={"api_key": "a-key"}) as service:
        program("send_request.py")(service.server.grpc_address)
        monkeypatch.setenv("OUTRIDER_API_KEY", "another")
        with pytest.raises(OutriderError):
            program("send_request.py")(service.server.grpc_address)
    assert "answered: " in capsys.readouterr().out


def test_the_test_of_a_release_trusts_the_authority_of_its_certificate(tmp_path: Path) -> None:
    authority: Callable[..., Path] = runpy.run_path(str(CHART / "files" / "send_request.py"))[
        "authority"
    ]
    assert authority(str(tmp_path)) == tmp_path / "tls.crt"
    (tmp_path / "ca.crt").touch()
    assert authority(str(tmp_path)) == tmp_path / "ca.crt"


def test_models_are_fetched_as_the_configuration_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = {"type": "pvc", "prefetch": {"enabled": True}}
    rendered = render(modelCache=cache, target={"device": "cpu"})
    name = rendered.of("model-prefetch.yaml")[-1]["metadata"]["name"]
    file = tmp_path / "config.yaml"
    file.write_text(rendered.config_text(name), encoding="utf-8")
    program("fetch_models.py")(str(file))
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "smollm2-135m-instruct",
        "smollm2-135m-draft",
    ]


def test_a_model_that_is_not_there_ends_the_fetching(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("target: {model: /nowhere}\n", encoding="utf-8")
    with pytest.raises(OutriderError, match="/nowhere"):
        program("fetch_models.py")(str(tmp_path / "config.yaml"))


def test_the_pod_of_a_test_reaches_the_service(tmp_path: Path) -> None:
    pod = render().pod("test")
    (container,) = pod.spec["containers"]
    python, script, server = container["args"]
    assert (python, script) == ("python", "/etc/outrider-test/send_request.py")
    assert server == "demo-outrider-gateway.llm.svc:50051"
    hooks = render().one("Pod")["metadata"]["annotations"]
    assert hooks["helm.sh/hook"] == "test"


def test_the_pod_of_a_test_shows_the_key_that_clients_show() -> None:
    def key(**values: Any) -> Any:
        (container,) = render(**values).pod("test").spec["containers"]
        found = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container.get("env", [])}
        return found.get("OUTRIDER_API_KEY")

    assert key() == {"name": "demo-outrider-secrets", "key": "api-key"}
    assert key(auth={"existingSecret": "a"}) == {"name": "a", "key": "api-key"}
    assert key(auth={"anonymous": True}) is None
    given = key(auth={"keysSecret": "a"}, tests={"apiKeySecret": "b"})
    assert given == {"name": "b", "key": "api-key"}


def test_there_is_no_pod_where_no_request_could_be_sent() -> None:
    assert render(auth={"keysSecret": "a"}).of("tests/request.yaml") == []
    tls = {"enabled": True, "existingSecret": "a", "clientCASecret": "b"}
    rendered = render(tls=tls)
    assert rendered.of("tests/request.yaml") == []
    assert "helm -n llm test" not in rendered.texts["outrider/templates/NOTES.txt"]


def test_the_pod_of_a_test_uses_tls_where_the_server_does() -> None:
    (container,) = example("production").pod("test").spec["containers"]
    assert container["args"][-1] == "/etc/outrider-tls"
    assert {"name": "tls", "mountPath": "/etc/outrider-tls", "readOnly": True} in container[
        "volumeMounts"
    ]
