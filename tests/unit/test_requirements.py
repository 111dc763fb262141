"""What the project needs: how it is named to a user, and the exact versions of CI and images."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
from packaging.requirements import Requirement

from outrider import requirements

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def extra(name: str) -> list[str]:
    wanted: list[str] = PROJECT["project"]["optional-dependencies"][name]
    return wanted


# As wheels have them.
IN_A_WHEEL = [
    "torch<3,>=2.11",
    'uvloop>=0.21; sys_platform != "win32"',
    'aiohttp>=3.11; extra == "bench"',
    'triton>=3.6; sys_platform == "linux" and extra == "dev"',
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, ("torch<3,>=2.11", 'uvloop>=0.21; sys_platform != "win32"')),
        ("bench", ("aiohttp>=3.11",)),
        ("dev", ('triton>=3.6; sys_platform == "linux"',)),
        ("none", ()),
    ],
)
def test_requirements_are_those_of_the_installed_package(
    name: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: IN_A_WHEEL)
    assert requirements.requirements.__wrapped__(name) == expected


@pytest.mark.parametrize("name", [None, "bench", "deploy", "clients", "browser"])
def test_requirements_of_a_checkout_that_is_not_installed_are_those_of_the_project(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", absent)
    declared = PROJECT["project"]["dependencies"] if name is None else extra(name)
    assert [*requirements.requirements.__wrapped__(name)] == declared


def absent(name: str) -> NoReturn:
    raise metadata.PackageNotFoundError


def test_the_command_that_installs_a_package_names_all_that_is_missing_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # not above the interpreter, which would be named from there
    real = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        return absent(name) if name in ("scipy", "aiohttp", "torch", "grpcio") else real(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(
        requirements,
        "_declared",
        lambda: [
            *PROJECT["project"]["dependencies"],
            *(f"{e}; extra == 'bench'" for e in extra("bench")),
        ],
    )
    monkeypatch.setattr(requirements, "requirements", requirements.requirements.__wrapped__)
    command = f"{sys.executable} -m pip install"
    wanted = {name: [each for each in extra("bench") if name in each] for name in ("scipy", "aioh")}
    bench = shlex.join([*wanted["aioh"], *wanted["scipy"]])
    assert requirements.how_to_get("aiohttp") == f"{command} {bench}"
    core = requirements.how_to_get("grpc")
    assert core is not None and core.startswith(f"{command} 'grpcio>=")
    assert " 'torch" in core and "outrider" not in core.removeprefix(command)
    assert requirements.how_to_get("antigravity") is None


def test_without_pip_the_command_is_that_of_uv_or_of_a_pip_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    has_uv = [True, False]
    monkeypatch.setattr(shutil, "which", lambda name: name if has_uv.pop(0) else None)
    ways = [f"uv pip install --python {sys.executable}", f"pip --python {sys.executable} install"]
    for expected in ways:
        command = requirements.install_command(["a>=1"], "--no-deps")
        assert command == f"{expected} --no-deps 'a>=1'"


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in pins)
    found = dict(pin.split("==") for pin in pins)
    assert [*found] == sorted(found) and len(found) == len(pins)
    return found


def test_the_lock_has_a_version_of_everything_that_the_project_allows() -> None:
    """And nothing else: no address, no build for one kind of machine."""
    pins = locked()
    project = PROJECT["project"]
    declared = [
        *project["dependencies"],
        *itertools.chain(*project["optional-dependencies"].values()),
    ]
    for requirement in map(Requirement, declared):
        if requirement.name != "outrider":
            version = pins[re.sub(r"[-_.]+", "-", requirement.name).lower()]
            assert requirement.specifier.contains(version), f"{requirement}; run: make lock"
    for line in re.findall(r'pip install "torch==([\d.]+)"', (ROOT / "Makefile").read_text()):
        assert line == pins["torch"]


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.11.0"), ("transformers", "5.17.0"), ("triton", "3.6.0")]
)
def test_what_gpu_hosts_have_is_allowed(name: str, version: str) -> None:
    declared = [*PROJECT["project"]["dependencies"], *extra("dev")]
    [wanted] = [each for each in map(Requirement, declared) if each.name == name]
    assert wanted.specifier.contains(version)


def test_a_lock_is_names_and_versions_alone() -> None:
    report = {
        "install": [
            {"metadata": {"name": "torch", "version": "2.13.0+cpu"}, "download_info": {"url": "x"}},
            {"metadata": {"name": "Jinja2", "version": "3.1.6"}, "download_info": {"url": "x"}},
            {"metadata": {"name": "outrider", "version": "0.1.0"}, "download_info": {"url": "x"}},
        ]
    }
    done = subprocess.run(
        [sys.executable, ROOT / "docker" / "lock.py"],
        input=json.dumps(report),
        capture_output=True,
        text=True,
        check=True,
    )
    pins = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert pins == ["jinja2==3.1.6", "torch==2.13.0"]
