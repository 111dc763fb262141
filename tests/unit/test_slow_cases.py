"""`make test` runs every test but the listed cases, and those with servers from one folder."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SLOW = tomllib.loads((TESTS / "slow_cases.toml").read_text(encoding="utf-8"))
STARTING = {"cluster_tools", "process_tools", "hosts", "kubelet", "pod_cluster"}
STARTING_MARKS = {"pytest.mark.alone", "pytest.mark.ray"}


@pytest.mark.parametrize("test", SLOW)
def test_a_listed_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_whatever_starts_servers_is_an_integration_test() -> None:
    wrong = [
        path.relative_to(TESTS)
        for path in TESTS.rglob("test_*.py")
        if "integration" not in path.parts and _starts_servers(path)
    ]
    assert wrong == []


def _starts_servers(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in STARTING:
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) in STARTING_MARKS:
            return True
    return False
