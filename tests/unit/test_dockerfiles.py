"""What the Dockerfiles promise, and that whatever they name is there."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from outrider.checkpoints.resolve import TARGET_REQUIREMENT

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
SCRIPTS = sorted(DOCKER.glob("*.sh"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(file: Path) -> list[str]:
    """Of a Dockerfile, one a line, without comments."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def of(file: Path, name: str) -> list[str]:
    lines = [line for line in instructions(file) if line.startswith(f"{name} ")]
    return [line.removeprefix(f"{name} ") for line in lines]


def test_there_are_two_images() -> None:
    assert [file.name for file in FILES] == ["engine.Dockerfile", "gateway.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_bases_have_an_exact_tag_and_take_a_digest(file: Path) -> None:
    stages = set[str]()
    for line in of(file, "FROM"):
        base, _, name = line.partition(" AS ")
        assert base in stages or base == "python:${BASE_TAG}${BASE_DIGEST}"
        stages.add(name)
    arguments = dict(line.split("=", 1) for line in of(file, "ARG") if "BASE" in line)
    assert re.fullmatch(r"\d+\.\d+\.\d+-slim-\w+", arguments["BASE_TAG"])
    assert arguments["BASE_DIGEST"] == ""


def test_both_images_have_one_base() -> None:
    tags = [[arg for arg in of(file, "ARG") if arg.startswith("BASE_TAG")] for file in FILES]
    assert tags[0] == tags[1] != []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nobody_is_root_and_health_is_checked(file: Path) -> None:
    [user] = of(file, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # by number, as Kubernetes must be sure of it
    assert f"--uid {user.partition(':')[0]} " in file.read_text()
    [check] = of(file, "HEALTHCHECK")
    assert check.endswith('CMD ["healthcheck.sh"]')
    assert of(file, "ENTRYPOINT") == ['["entrypoint.sh"]']


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_says_its_own_command_and_names_scripts_that_are_there(file: Path) -> None:
    text = file.read_text()
    assert f"docker build -f docker/{file.name} " in text
    named = set(re.findall(r"/checkout/(docker/[\w.-]+)", text))
    assert "docker/install.sh" in named
    assert all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_may_be_executed_and_are_valid(script: Path) -> None:
    assert os.access(script, os.X_OK)
    shell = script.read_text().splitlines()[0].removeprefix("#!")
    done = subprocess.run([shell, "-n", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_engines_image_has_what_the_probes_of_kuberay_need() -> None:
    [packages] = re.findall(r"apt-get install (.*?) &&", " ".join(of(FILES[0], "RUN")))
    assert {"bash", "wget", "gcc"} <= set(packages.split())
    assert "'export PATH=/opt/outrider/bin:$PATH' > /etc/profile.d/" in FILES[0].read_text()
    assert '"$wheel[deploy]"' in (DOCKER / "install.sh").read_text()
    deploy = PROJECT["optional-dependencies"]["deploy"]
    assert any(line.startswith("ray[default]") for line in deploy)


def test_the_bundled_target_is_the_one_that_is_told_of_elsewhere() -> None:
    package = TARGET_REQUIREMENT
    assert f'"{package}"' in (DOCKER / "install.sh").read_text()
    assert f'"{package}"' in (ROOT / "Makefile").read_text()


def test_the_gateways_requirements_are_the_projects_without_tensors_and_ray() -> None:
    script, made = DOCKER / "gateway_requirements.py", DOCKER / "gateway-requirements.txt"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert made.read_text() == done.stdout, "run: make docker-requirements"
    lines = made.read_text().splitlines()
    assert not [line for line in lines if line.startswith(("torch", "ray", "gguf"))]
    assert set(lines[1:]) < set(PROJECT["dependencies"])


def test_an_image_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [DOCKER / "install.sh", "engin", "some.whl", tmp_path / "prefix"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stderr == "error: there is no image engin; give engine or gateway.\n"
    assert not (tmp_path / "prefix").exists()


def bill_of(*kinds: str) -> dict[str, Any]:
    """What the images' script says of the environment that runs this test."""
    done = subprocess.run(
        [sys.executable, DOCKER / "sbom.py", *kinds], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_bill_of_materials_has_every_distribution_with_its_licence() -> None:
    bill = bill_of("python")
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {each["name"].lower(): each for each in bill["components"]}
    installed = metadata.distributions(path=[sysconfig.get_path("purelib")])
    assert {each.metadata["Name"].lower() for each in installed} <= set(found)
    assert "psutil" in found, "which Ray carries along"
    torch = found["torch"]
    assert torch["purl"].startswith("pkg:pypi/torch@") and torch["licenses"]
    unlicensed = [name for name, each in found.items() if not each.get("licenses")]
    assert len(unlicensed) < len(found) / 10, unlicensed
    references = [each["bom-ref"] for each in bill["components"]]
    assert references == sorted(set(references))


def test_the_bill_of_materials_is_the_same_for_the_same_environment() -> None:
    assert bill_of("python") == bill_of("python")


def test_the_bill_of_materials_has_the_packages_of_debian(tmp_path: Path) -> None:
    for name, text in {
        "etc/os-release": 'ID="debian"\nVERSION_ID="12"\n',
        "var/lib/dpkg/status": (
            "Package: gcc\nStatus: install ok installed\nVersion: 4:12.2.0-3\n"
            "Architecture: amd64\nDescription: a compiler\n Version: none\n\n"
            "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\nArchitecture: all\n"
        ),
        "usr/share/doc/gcc/copyright": "Format: 1.0\n\nFiles: *\nLicense: GPL-3+\n text\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    script = runpy.run_path(str(DOCKER / "sbom.py"))
    [found] = script["debian_components"](tmp_path)
    assert found["purl"] == "pkg:deb/debian/gcc@4%3A12.2.0-3?arch=amd64"
    assert found["licenses"] == [{"license": {"name": "GPL-3+"}}]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_image_carries_its_bill_of_materials(file: Path) -> None:
    text = " ".join(of(file, "RUN"))
    assert "sbom.py debian python > /usr/share/sbom/base.cdx.json" in text
    assert "ln -s /opt/outrider/share/sbom/outrider.cdx.json /usr/share/sbom/" in text
    assert '"$prefix/share/sbom/outrider.cdx.json"' in (DOCKER / "install.sh").read_text()
