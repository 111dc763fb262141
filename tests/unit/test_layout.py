"""The arrangement of folders: real code at the root, links to it inside the package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "outrider"
# Every root folder that may hold code of the package; only those that exist are checked.
CODE_FOLDERS = (
    *("cluster", "workers", "scheduler", "kernels", "proto", "gateway", "train"),
    *("loadtest", "benchmarks"),
)
PRESENT = [name for name in CODE_FOLDERS if (ROOT / name).is_dir()]


def test_the_folders_the_engine_is_made_of_exist() -> None:
    assert {"scheduler", "workers", "kernels"} <= set(PRESENT)


@pytest.mark.parametrize("name", PRESENT)
def test_a_code_folder_is_linked_into_the_package(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink(), f"{link} must be a link: clone with core.symlinks=true"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", PRESENT)
def test_a_link_is_relative_so_that_a_copied_checkout_works(name: str) -> None:
    assert os.readlink(PACKAGE / name) == f"../../{name}"


@pytest.mark.parametrize("name", PRESENT)
def test_a_code_folder_is_no_package_of_its_own(name: str) -> None:
    """With an `__init__.py` it would win over installed packages named `kernels` or `proto`."""
    assert not (ROOT / name / "__init__.py").exists()


def test_every_link_of_the_package_leads_to_a_code_folder() -> None:
    links = {path.name for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == set(PRESENT)


def test_a_folder_exists_only_with_something_in_it() -> None:
    empty = [name for name in PRESENT if not any((ROOT / name).rglob("*.*"))]
    assert empty == []


def test_the_engine_ties_parts_together_in_at_most_20_modules() -> None:
    found = {path.relative_to(PACKAGE) for path in (PACKAGE / "engine").rglob("*.py")}
    modules = sorted(str(path) for path in found if path.name != "__init__.py")
    assert len(modules) <= 20, modules
