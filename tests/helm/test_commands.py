"""What containers run is what our own command takes, with a configuration it finds valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from chart_tools import EXAMPLES, Pod, Rendered, example, render

from outrider import cli
from outrider.cli.config import check
from outrider.config import EngineConfig
from outrider.config.sources import resolve
from outrider.gateway.exposure import check_exposure

CASES: dict[str, dict[str, Any] | None] = {
    **{name: None for name in EXAMPLES},
    "ngram": {"draft": {"method": "ngram"}},
    "off": {"draft": {"method": "off"}},
    "plain on CPUs": {"mode": "plain", "target": {"device": "cpu"}, "replicas": 2},
    "everything said": {
        "model": "owner/name",
        "revision": "main",
        "tokenizer": "owner/tokenizer",
        "servedNames": ["a", "b"],
        "target": {"dtype": "bfloat16", "quantization": "fp8", "maxModelLen": 4096},
        "draft": {
            "model": "owner/draft",
            "revision": "v1",
            "dtype": "float16",
            "quantization": "int8",
            "device": "cpu",
            "policy": "trim",
            "numSpeculativeTokens": 7,
            "tensorParallel": 2,
        },
        "auth": {"keysSecret": "keys"},
        "tls": {"enabled": True, "existingSecret": "tls", "clientCASecret": "ca"},
        "hub": {"token": "t", "endpoint": "https://hub.example", "offline": True},
    },
}
CONFIG = Path("/etc/outrider/config.yaml")
# Which command a container runs.
COMMANDS = {"gateway": "gateway", "controller": "controller", "server": "serve"}


def rendered_of(case: str) -> Rendered:
    values = CASES[case]
    return example(case) if values is None else render(values)


def containers(rendered: Rendered) -> list[tuple[Pod, dict[str, Any]]]:
    return [
        (pod, container)
        for pod in rendered.pods
        for container in pod.spec["containers"]
        if container["name"] in COMMANDS
    ]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """By the parser of the command itself, without running it."""
    assert words[0] == "outrider"
    group: Any = typer.main.get_command(cli.app)
    context = group.context_class(group, info_name="outrider", obj=cli.GlobalOptions())
    name, command, rest = group.resolve_command(context, words[1:])
    with command.make_context(name, rest, parent=context) as inner:
        return name, inner.params


def config_text(rendered: Rendered, pod: Pod, container: dict[str, Any], file: Path) -> str:
    """Of the file as the container sees it."""
    (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == str(file.parent))
    (volume,) = (v for v in pod.spec["volumes"] if v["name"] == mount["name"])
    config_map = rendered.one("ConfigMap", volume["configMap"]["name"])
    text: str = config_map["data"][file.name]
    return text


def environment(container: dict[str, Any]) -> dict[str, str]:
    """With a word in place of each secret, and what the images set."""
    own = {e["name"]: e.get("value", "a-secret") for e in container["env"]}
    return {"OUTRIDER_SERVER_HOST": "0.0.0.0", "OUTRIDER_SERVER_ADMIN_PORT": "8081", **own}


def configured(rendered: Rendered, pod: Pod, container: dict[str, Any], to: Path) -> EngineConfig:
    to.write_text(config_text(rendered, pod, container, CONFIG), encoding="utf-8")
    return resolve(to, environment(container)).config


@pytest.mark.parametrize("case", CASES)
def test_every_command_line_is_one_that_the_command_takes(case: str) -> None:
    found = containers(rendered_of(case))
    assert found
    for _, container in found:
        name, params = parsed(container["args"])
        assert name == COMMANDS[container["name"]]
        assert params["config"] == CONFIG
        assert params.get("no_ray", False) is (container["name"] == "server")


def test_an_option_that_the_command_has_not_would_be_found() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parsed(["outrider", "serve", "--no-such-option"])


@pytest.mark.parametrize("case", CASES)
def test_every_configuration_is_valid(case: str, tmp_path: Path) -> None:
    rendered = rendered_of(case)
    texts = [
        m["data"]["config.yaml"] for m in rendered.all("ConfigMap") if "config.yaml" in m["data"]
    ]
    assert texts
    for text in texts:
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        check(tmp_path / "config.yaml")


@pytest.mark.parametrize("case", CASES)
def test_variables_are_settings_or_none_of_ours(case: str, tmp_path: Path) -> None:
    rendered = rendered_of(case)
    for pod, container in containers(rendered):
        config = configured(rendered, pod, container, tmp_path / "config.yaml")
        assert config.server.admin_port == 8081


@pytest.mark.parametrize("case", CASES)
def test_nobody_refuses_to_listen(case: str, tmp_path: Path) -> None:
    rendered = rendered_of(case)
    for pod, container in containers(rendered):
        server = configured(rendered, pod, container, tmp_path / "config.yaml").server
        if server.processes:
            assert (check_exposure(server) is not None) is server.allow_anonymous
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports["admin"] == server.admin_port
        if container["name"] == "controller":
            assert server.processes == 0, "clients have no business there"
        else:
            assert (ports["http"], ports["grpc"]) == (server.port, server.grpc_port)


def test_values_become_the_settings_they_are_named_after(tmp_path: Path) -> None:
    rendered = rendered_of("everything said")
    for pod, container in containers(rendered):
        config = configured(rendered, pod, container, tmp_path / "config.yaml")
        assert (config.target.model, config.target.revision) == ("owner/name", "main")
        assert (config.target.quantization, config.target.max_model_len) == ("fp8", 4096)
        assert (config.draft.model, config.draft.revision) == ("owner/draft", "v1")
        assert config.draft.tensor_parallel == 2
        assert (config.draft.dtype, config.draft.device) == ("float16", "cpu")
        assert config.speculation.policy == "trim"
        assert config.speculation.num_speculative_tokens == 7
        if container["name"] == "gateway":
            assert config.server.model_names == ("a", "b")


@pytest.mark.parametrize(("method", "expected"), [("ngram", "ngram"), ("off", None)])
def test_a_method_without_a_draft_has_none(method: str, expected: str, tmp_path: Path) -> None:
    rendered = rendered_of(method)
    for pod, container in containers(rendered):
        config = configured(rendered, pod, container, tmp_path / "config.yaml")
        assert config.draft.model is None
        assert config.method == expected


# Read by Python's libraries, Ray, Triton and the hub's client; OUTRIDER_* are checked above.
KNOWN = {"HOME", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR"}
KNOWN |= {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_set_no_variable_that_nothing_reads(name: str) -> None:
    for _, container in containers(example(name)):
        found = {each["name"] for each in container["env"]}
        assert {each for each in found if not each.startswith("OUTRIDER_")} <= KNOWN
