"""What is installed and what runs are the same: extras, packaged files, stamps of the Makefile."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MARKS = [line.split(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]
CODE = ("cluster", "gateway", "kernels", "proto", "scheduler", "workers", "src/outrider")
# What pip calls otherwise than Python does, and what needs a compiler of GPU kernels anyway: where
# there is a GPU, torch brings triton along.
MODULES = {"pyyaml": "yaml", "pytest-timeout": "pytest_timeout", "pytest-xdist": "xdist"}
BESIDE_A_GPU = "triton"
BESIDE_RAY = "jsonschema"  # Ray brings it along; `outrider deploy` checks Ray's files with it


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!;~ ]", each)[0].lower() for each in requirements}


def extra(name: str) -> list[str]:
    wanted: list[str] = PROJECT["project"]["optional-dependencies"][name]
    return wanted


def core_files() -> Iterator[Path]:
    """Of what `outrider serve` and `outrider generate` are made: everything but the benches."""
    for folder in CODE:
        for file in (ROOT / folder).rglob("*.py"):
            if "bench" not in file.relative_to(ROOT).parts:
                yield file


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_the_extras_are_those_that_are_documented() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"bench", "deploy", "clients", "browser", "dev"}
    assert "outrider[bench,clients,browser]" in extras["dev"]


def test_no_module_that_serves_imports_a_package_of_an_extra() -> None:
    extras = names_of([*extra("bench"), *extra("clients"), *extra("browser"), *extra("dev")])
    core = names_of(PROJECT["project"]["dependencies"])
    forbidden = {
        MODULES.get(name, name) for name in extras - core - {"outrider", BESIDE_A_GPU, BESIDE_RAY}
    }
    assert {"aiohttp", "scipy", "matplotlib", "pytest", "openai"} <= forbidden
    wrong = {str(f.relative_to(ROOT)): imported(f) & forbidden for f in core_files()}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_only_kernels_and_what_runs_them_import_triton() -> None:
    users = {f.relative_to(ROOT) for f in core_files() if BESIDE_A_GPU in imported(f)}
    assert {"gpu" in path.parts for path in users} == {True}


def test_every_file_that_is_no_code_is_packaged() -> None:
    patterns: dict[str, list[str]] = PROJECT["tool"]["setuptools"]["package-data"]
    tracked = subprocess.run(
        ["git", "ls-files", *CODE, "loadtest"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if tracked.returncode:
        pytest.skip("not a checkout")
    packaged = [
        f"{package.replace('.', '/').removeprefix('outrider').lstrip('/')}/{pattern}".lstrip("/")
        for package, globs in patterns.items()
        for pattern in globs
    ]
    files = [name.removeprefix("src/outrider/") for name in tracked.stdout.splitlines()]
    files = [name for name in files if (ROOT / name).suffix != ".py" and "." in name]
    assert [file for file in files if not any(map(partial(matches, file), packaged))] == []


def matches(file: str, pattern: str) -> bool:
    """As setuptools does: a star stays in its folder."""
    return fnmatch.fnmatch(file, pattern) and file.count("/") == pattern.count("/")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile, and an environment whose pip only notes what it is asked for."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").write_text("first\n")
    (tmp_path / "requirements.lock").write_text("first\n")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "outrider", "python", "ruff", "mypy"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> calls\n')
        (programs / name).chmod(0o755)
    return tmp_path


def make(checkout: Path, goal: str) -> list[str]:
    """What was installed and run for a goal."""
    calls = checkout / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(["make", goal], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines() if calls.exists() else []


def installs(calls: list[str]) -> list[str]:
    return [call.split()[-1] for call in calls if call.startswith("pip install torch")]


def test_serving_installs_the_core_once(checkout: Path) -> None:
    assert installs(make(checkout, "serve")) == ["."]
    assert make(checkout, "serve") == ["outrider serve"]


def test_the_rest_follows_when_it_is_needed_and_serves_as_well(checkout: Path) -> None:
    make(checkout, "serve")
    assert installs(make(checkout, "lint")) == [".[dev]"]
    assert installs(make(checkout, "lint")) == []
    assert make(checkout, "serve") == ["outrider serve"]


def test_everything_may_be_installed_first(checkout: Path) -> None:
    assert installs(make(checkout, "lint")) == [".[dev]"]
    assert make(checkout, "serve") == ["outrider serve"]


def test_a_change_of_the_project_is_installed_for_each_when_it_is_called(checkout: Path) -> None:
    make(checkout, "lint")
    for name in ("pyproject.toml", "requirements.lock"):
        (checkout / name).write_text("second\n")
        assert installs(make(checkout, "serve")) == ["."]
        assert installs(make(checkout, "lint")) == [".[dev]"]
        assert installs(make(checkout, "serve")) == []


def test_what_is_installed_has_the_versions_of_the_lock(checkout: Path) -> None:
    for goal in ("serve", "lint"):
        [call] = [each for each in make(checkout, goal) if each.startswith("pip install torch")]
        assert " -c requirements.lock -e " in call


def test_a_project_that_only_looks_newer_is_not_installed_again(checkout: Path) -> None:
    make(checkout, "lint")
    (checkout / "pyproject.toml").write_text("first\n")
    assert installs(make(checkout, "lint")) + installs(make(checkout, "serve")) == []


@pytest.mark.parametrize(
    ("goal", "packages"),
    [("browser", "chromium"), ("hosts", "openssh-server openssh-client iproute2 rsync")],
)
def test_without_the_right_to_install_programs_the_one_command_is_told(
    goal: str, packages: str, checkout: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("make", "sh", "id", "echo"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    done = subprocess.run(
        ["make", goal],
        cwd=checkout,
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"with: sudo apt-get install {packages}" in done.stdout


def chosen(goal: str) -> list[str]:
    """The expressions by which the runs of a goal choose their tests."""
    recipe = re.search(rf"^{goal}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    return re.findall(r'-m "([^"]+)"', recipe[1])


def test_whatever_its_marks_a_test_is_run_once_by_make_test_or_by_make_test_slow() -> None:
    goals = {"test-others": "test", "test-servers": "test", "test-slow": "test-slow"}
    runs = [(goals[part], run) for part in goals for run in chosen(part)]
    for has in itertools.product((False, True), repeat=len(MARKS)):
        of_test = dict(zip(MARKS, has, strict=True)) | {"gpu": False}
        taken = [goal for goal, run in runs if eval(run, of_test)]
        assert taken == ["test-slow" if of_test["slow"] else "test"]


def test_the_fast_tests_have_no_mark() -> None:
    (fast,) = chosen("test-fast")
    assert eval(fast, dict.fromkeys(MARKS, False))
    for mark in set(MARKS) - {"ray"}:  # which is never without `alone`
        assert not eval(fast, {each: each == mark for each in MARKS})
