"""The wheel as images get it, and environments it is installed into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
PACKAGES = Path(sysconfig.get_path("purelib"))
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Built:
    wheel: Path
    sdist: Path


def admitted_names() -> list[str]:
    """What .dockerignore lets into the context of a build."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines  # everything else stays out
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def build(folder: Path) -> Built:
    """Built by the script of the images, from no more than they have."""
    context, dist = folder / "context", folder / "dist"
    context.mkdir()
    for name in admitted_names():
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if source.is_dir():
            shutil.copytree(source, context / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, context)
    run(context / "docker" / "build-wheel.sh", dist)
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return Built(wheel, sdist)


def install(kind: str, wheel: Path, prefix: Path, dependencies: Path = PACKAGES) -> Path:
    """The programs of an environment with the wheel, beside packages that are there."""
    run(DOCKER / "install.sh", kind, wheel, prefix, DEPENDENCIES=str(dependencies))
    return prefix / "bin"


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env=clean_environment() | {"PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Without the checkout that tests import from."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def only_packages(
    requirements: Iterable[str], folder: Path, *, with_dependencies: bool = True
) -> Path:
    """A folder of what pip would install for the requirements, besides what is in it already."""
    folder.mkdir(exist_ok=True)
    wanted, seen = [Requirement(line) for line in requirements], set[str]()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = metadata.distribution(name)
        if with_dependencies:
            wanted += map(Requirement, found.requires or ())
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link, there = folder / top, PACKAGES / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(there)
    return folder
