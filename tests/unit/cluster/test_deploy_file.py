"""Files of clusters: those that come with Outrider, and what is said about others."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from outrider.cluster.deploy.cluster_file import ClusterFile, ray_schema, read_cluster_file
from outrider.config.sources import resolve
from outrider.errors import ConfigError

FILES = Path(__file__).resolve().parents[3] / "cluster" / "ray"
KINDS = ("on-premise", "aws", "gcp")


def settings_of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FILES / f"{kind}.yaml").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundled_file_keeps_to_rays_schema(kind: str) -> None:
    found = [
        error.message for error in Draft7Validator(ray_schema()).iter_errors(settings_of(kind))
    ]
    assert found == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundled_file_is_accepted_by_rays_own_checks(kind: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(settings_of(kind))
    validate_config(prepared)
    assert prepared["cluster_name"] == "outrider"
    assert prepared["max_workers"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_ray_is_started_with_a_token_and_tells_nobody(kind: str) -> None:
    settings = settings_of(kind)
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [command for command in settings[name] if "ray start" in command]
        assert "RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 ray start" in start
    assert settings["file_mounts"]["~/.ray/auth_token"] == "ray-token"


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_for_hosts_is_one_that_a_shell_reads(kind: str) -> None:
    settings = settings_of(kind)
    commands = [each for name in settings if name.endswith("_commands") for each in settings[name]]
    assert len(commands) >= 7
    for command in commands:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ("aws", "gcp"))
def test_models_have_hosts_of_their_role_and_only_drafts_may_be_taken_away(kind: str) -> None:
    types = settings_of(kind)["available_node_types"]
    assert {name: each["labels"]["outrider-role"] for name, each in types.items()} == {
        "head": "head",
        "target": "target",
        "draft": "draft",
    }
    assert types["head"]["resources"] == {"CPU": 0, "GPU": 0}
    assert [name for name, each in types.items() if each["resources"]["GPU"]] == ["target", "draft"]
    spot = [n for n, each in types.items() if re.search("spot|preempt", str(each["node_config"]))]
    assert spot == ["draft"]


def test_roles_of_files_are_those_that_the_settings_ask_for() -> None:
    cluster = resolve(FILES / "serve.yaml").config.cluster
    assert cluster.target_labels == ("outrider-role=target",)
    assert cluster.draft_labels == ("outrider-role=draft",)
    start = settings_of("on-premise")["worker_start_ray_commands"][-1]
    assert "--labels=outrider-role=$role" in start


@pytest.mark.parametrize("kind", KINDS)
def test_what_must_be_edited_is_marked(kind: str) -> None:
    """The line itself, or the comment right above what it belongs to."""
    lines = (FILES / f"{kind}.yaml").read_text().splitlines()
    values = {m for line in lines for m in re.findall(r"EDIT-[A-Z-]+", line)}
    assert values
    for value in values:
        first = next(number for number, line in enumerate(lines) if value in line)
        assert any("# EDIT" in line for line in lines[first - 4 : first + 1]), value


def edited(folder: Path, **changes: Any) -> Path:
    """An on-premise file that is fit to be used, but for the changes."""
    settings = settings_of("on-premise")
    settings["provider"] |= {"head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]}
    settings["auth"] = {"ssh_user": "me"}
    settings["worker_start_ray_commands"] = ["ray start"]
    settings |= changes
    (folder / "conf").mkdir()
    (folder / "dist").mkdir()
    (folder / "conf" / "serve.yaml").write_text((FILES / "serve.yaml").read_text())
    (folder / "dist" / "outrider-1-py3-none-any.whl").touch()
    (folder / "ray-token").touch()
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_an_edited_file_is_read_with_what_it_names(tmp_path: Path) -> None:
    file = read_cluster_file(edited(tmp_path))
    assert (file.name, file.is_local, file.head_ip) == ("outrider", True, "10.0.0.1")
    assert file.worker_ips == ("10.0.0.2", "10.0.0.3")
    assert file.serving.server.admin_port == 8081


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"provider": {"type": "local", "head_ip": "EDIT-HEAD-IP"}}, "provider.head_ip is 'EDIT-"),
        ({"provider": {"type": "local", "head_ip": "a"}}, "provider.worker_ips is missing; name"),
        (
            {"provider": {"type": "local", "head_ip": "a", "worker_ips": ["a"]}},
            "provider.worker_ips names the head, a; a host cannot be both.",
        ),
        ({"auth": {}}, "auth.ssh_user is missing; name the SSH user"),
        ({"file_mounts": {}}, "file_mounts has no ~/outrider/conf; it carries"),
        (
            {"file_mounts": {"~/outrider/conf": "nowhere"}},
            "~/outrider/conf comes from nowhere, which is not in",
        ),
        ({"max_worker": 3}, r"'max_worker' was unexpected\); `ray up` would refuse it."),
        ({"max_workers": "three"}, "max_workers: 'three' is not of type 'integer'; `ray up`"),
        (
            {"docker": {"image": "ray", "container_name": "ray"}},
            "docker.container_name is set, but the server is started on the hosts",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = edited(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"^{path}: .*{sentence}") as caught:
        read_cluster_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1", r":\d+: invalid YAML: "),
        ("- a", ": not a mapping; 'outrider deploy init'"),
        ("\x00", ": invalid YAML: "),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}{sentence}"):
        read_cluster_file(path)


def test_a_file_that_is_not_there_says_who_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file.*'outrider deploy init'"):
        read_cluster_file(tmp_path / "cluster.yaml")


def test_hosts_get_exactly_one_wheel(tmp_path: Path) -> None:
    path = edited(tmp_path)
    (tmp_path / "dist" / "outrider-2-py3-none-any.whl").touch()
    with pytest.raises(ConfigError, match="must hold one wheel of Outrider and holds outrider-1"):
        read_cluster_file(path)
    for wheel in (tmp_path / "dist").iterdir():
        wheel.unlink()
    with pytest.raises(ConfigError, match="holds none; `make wheel` builds it"):
        read_cluster_file(path)


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ("{port: 1}", "server.admin_port must be set"),
        ("{admin_port: 1, port: 0}", "server.port and server.grpc_port must be set"),
        ("{admin_port: 1, host: 0.0.0.0}", "no API key is set"),
        ("{admin_prt: 1}", "admin_prt"),
    ],
)
def test_settings_that_cannot_be_deployed_are_told_before_anything_is_done(
    server: str, sentence: str, tmp_path: Path
) -> None:
    path = edited(tmp_path)
    (tmp_path / "conf" / "serve.yaml").write_text(f"server: {server}\n")
    with pytest.raises(ConfigError, match=sentence):
        read_cluster_file(path)


@pytest.mark.parametrize(("supervisor", "expected"), [("systemd", True), ("keeper", False)])
def test_a_file_says_what_keeps_the_server_running(
    supervisor: str, expected: bool, tmp_path: Path
) -> None:
    settings = settings_of("on-premise")
    assert "metadata" not in settings
    file = ClusterFile(tmp_path / "cluster.yaml", settings)
    assert not file.uses_systemd
    told = ClusterFile(file.path, settings | {"metadata": {"supervisor": supervisor}})
    assert told.uses_systemd is expected
    assert not list(Draft7Validator(ray_schema()).iter_errors(told.settings))
