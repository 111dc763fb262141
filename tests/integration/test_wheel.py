"""Wheel and sdist: what is in them, and that the wheel by itself runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from wheel_tools import PACKAGES, ROOT, Built, run

from outrider import __version__

pytestmark = pytest.mark.alone

FOLDERS = ("cluster", "gateway", "kernels", "proto", "scheduler", "workers", "bench", "train")
# Compiled for one minor of Python; all others have a build for any, or go without.
COMPILED = ("grpcio", "pydantic_core", "uvloop", "httptools")
NEXT_PYTHON = "python3.12"
DOWNLOAD_LIMIT_S = 90.0


def listed_files(*folders: str) -> set[str]:
    """Of the checkout, links left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if listed.returncode:
        pytest.skip("not a checkout")
    return {name for name in listed.stdout.splitlines() if not (ROOT / name).is_symlink()}


def tracked_files() -> set[str]:
    """Of the package, as they are called when it is installed."""
    names = listed_files(*FOLDERS, "src/outrider")
    return {f"outrider/{name.removeprefix('src/outrider/')}" for name in names}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == tracked_files()
    for kind in (".proto", ".c", ".html", ".safetensors"):
        assert any(name.endswith(kind) for name in packed)


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= packed
    assert {f"src/{name}" for name in tracked_files()} <= packed
    assert not [name for name in packed if name.startswith("tests")]


def test_the_sdist_holds_chart_dockerfiles_and_dashboard(built: Built) -> None:
    folders = ("helm", "docker", "docs/grafana")
    with tarfile.open(built.sdist) as sdist:
        packed = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    found = {name for name in packed if name.startswith(("helm/", "docker/", "docs/"))}
    assert found == listed_files(*folders)
    assert {"helm/outrider/Chart.yaml", "docs/grafana/outrider.json"} < found


def test_the_version_is_said_once_and_everything_tells_it(
    built: Built, engine_programs: Path
) -> None:
    assert run(engine_programs / "outrider", "--version") == f"outrider {__version__}\n"
    assert built.wheel.name == f"outrider-{__version__}-py3-none-any.whl"
    assert built.sdist.name == f"outrider-{__version__}.tar.gz"
    log = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)\]?", log, re.MULTILINE)
    assert released[0] == __version__, "CHANGELOG.md tells of another version than the package"


def test_an_installed_wheel_finds_its_files_without_the_checkout(engine_programs: Path) -> None:
    script = (
        "import outrider; from outrider.workers.weights.resolve import draft_assets; "
        "print(outrider.__file__, draft_assets(), sep='\\n')"
    )
    package, assets = run(engine_programs / "python", "-c", script).splitlines()
    prefix = str(engine_programs.parent)
    assert package.startswith(prefix) and assets.startswith(prefix)
    assert (Path(assets) / "model.safetensors").is_file()


def test_an_installed_environment_carries_its_bill_of_materials(engine_programs: Path) -> None:
    file = engine_programs.parent / "share" / "sbom" / "outrider.cdx.json"
    names = {each["name"] for each in json.loads(file.read_text())["components"]}
    assert {"outrider", "torch", "grpcio"} <= names


def next_python() -> str:
    """One that runs; a version manager may name some that do not."""
    places = [shutil.which(NEXT_PYTHON), *Path.home().glob(f".pyenv/versions/*/bin/{NEXT_PYTHON}")]
    for place in map(str, filter(None, places)):
        done = subprocess.run([place, "--version"], capture_output=True, timeout=30)
        if done.returncode == 0:
            return place
    pytest.skip(f"there is no {NEXT_PYTHON} here")


@pytest.mark.slow
def test_gateway_client_and_commands_import_on_the_next_python(
    built: Built, tmp_path: Path
) -> None:
    """The wheel without its dependencies, beside packages of this environment; the few that are
    compiled for one Python are fetched for the other."""
    python, packages = next_python(), tmp_path / "packages"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    versions = [f"{name}=={metadata.version(name)}" for name in COMPILED]
    fetch = [*pip, "--only-binary=:all:", "--retries=0", "--target", str(packages), *versions]
    try:
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer in time")
    if done.returncode:
        pytest.skip(f"the package index has not what {NEXT_PYTHON} needs: {done.stderr[-200:]}")
    run(*pip, "--no-index", "--target", packages, built.wheel)
    modules = "outrider.gateway.__main__, outrider.client, outrider.cli.serve, outrider.cli.chat"
    told = run(
        *(python, "-c", f"import sys, {modules}; print(outrider.__file__, 'torch' in sys.modules)"),
        PYTHONPATH=f"{packages}:{PACKAGES}",
    )
    assert told == f"{packages}/outrider/__init__.py False\n"
    version = run(python, "-m", "outrider", "--version", PYTHONPATH=f"{packages}:{PACKAGES}")
    assert version == f"outrider {__version__}\n"
