"""Wheel and sdist: what is in them, and that the wheel by itself runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from itertools import takewhile
from pathlib import Path

import pytest
from c_kernels import with_kernels
from packaging.requirements import Requirement
from wheel_tools import PACKAGES, ROOT, Built, clean_environment, install, only_packages, run

from outrider import __version__

pytestmark = pytest.mark.alone

FOLDERS = ("cluster", "gateway", "kernels", "proto", "scheduler", "workers", "loadtest", "train")
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
        "import outrider; from outrider.checkpoints.resolve import draft_assets; "
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


def core_without(*names: str) -> list[str]:
    declared: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    return [line for line in declared if Requirement(line).name not in names]


class NewcomersEnvironment:
    """The wheel in an environment of its own, and the way of a newcomer in it: what a message says
    is to be installed is there afterwards, linked from the packages of this interpreter."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self._packages = only_packages(core_without("torch"), folder / "packages")
        self.programs = install("engine", wheel, folder / "prefix", self._packages)
        self._environment = clean_environment() | {
            "OUTRIDER_CACHE": with_kernels(folder / "cache"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.programs / "outrider", *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def advice(self, *arguments: str) -> list[str]:
        """The command that the last line of `outrider` advises, in words."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        assert process.returncode in (1, 2), output
        found = re.search(r"^error: .* install (it|them) with: (.+)\n\Z", output, re.MULTILINE)
        assert found is not None, output
        return shlex.split(found[2])

    def follow(self, command: list[str]) -> None:
        words = [*command]
        assert words[:2] == ["pip", "--python"], "there is no pip in this environment"
        python, goal, *wanted = words[2:]
        assert Path(python).resolve() == (self.programs / "python").resolve() and goal == "install"
        options = [word for word in wanted if word.startswith("-")]
        named = [word for word in wanted if word not in options]
        assert options in ([], ["--no-deps"]) and named
        for each in map(Requirement, named):
            assert each.specifier.contains(metadata.version(each.name))
        only_packages(named, self._packages, with_dependencies=not options)


@pytest.fixture(scope="module")
def newcomer(built: Built, tmp_path_factory: pytest.TempPathFactory) -> NewcomersEnvironment:
    return NewcomersEnvironment(built.wheel, tmp_path_factory.mktemp("newcomer"))


SERVE = ("serve", "--no-ray", "--port", "0", "--grpc-port", "0", "--set", "cache.kv_cache_gb=0.1")


@pytest.mark.model
def test_who_follows_the_messages_comes_from_a_wheel_to_a_server_under_load(
    newcomer: NewcomersEnvironment,
) -> None:
    torch = newcomer.advice(*SERVE)
    assert torch == newcomer.advice("generate", "Hello")
    assert [Requirement(word).name for word in torch[4:]] == ["torch"]
    newcomer.follow(torch)
    weights = newcomer.advice(*SERVE)
    assert weights == newcomer.advice("generate", "Hello")
    newcomer.follow(weights)
    server = newcomer.start(*SERVE)
    try:
        assert server.stdout is not None
        lines = list(takewhile(lambda line: "Ctrl-C stops it" not in line, server.stdout))
        output = "".join(lines)
        address = re.search(r"for gRPC, on (\S+)", output)
        assert address is not None, output
        load = ["bench", "serve", "--arm", f"now={address[1]}", "--rate", "4", "--duration", "2s"]
        load += ["--warm-up", "0s", "--cool-down", "0s", "--max-tokens", "4"]
        bench = newcomer.advice(*load)
        assert {Requirement(word).name for word in bench[4:]} == {"aiohttp", "scipy", "matplotlib"}
        newcomer.follow(bench)
        measuring = newcomer.start(*load, "--out", str(newcomer.programs.parent / "run"))
        told, _ = measuring.communicate(timeout=300)
        assert measuring.returncode == 0, told
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode == 0


@pytest.mark.slow
def test_the_advised_command_is_one_that_pip_carries_out(built: Built, tmp_path: Path) -> None:
    newcomer = NewcomersEnvironment(built.wheel, tmp_path)
    newcomer.follow(newcomer.advice(*SERVE))
    command = newcomer.advice(*SERVE)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer in time")
    if done.returncode:
        pytest.skip(f"the package index has no such package: {done.stderr[-200:]}")
    generated = newcomer.start("generate", "Hello", "--max-tokens", "2")
    output, _ = generated.communicate(timeout=120)
    assert generated.returncode == 0, output


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
