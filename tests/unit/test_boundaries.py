"""Who may import what, seen from a fresh interpreter that imports a folder whole."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Imports every module below a package and tells which top-level modules are loaded afterwards.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
names = []
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    found = pkgutil.walk_packages(package.__path__, root + ".")
    names += [importlib.import_module(module.name).__name__ for module in found]
print(json.dumps([names, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def _import_all(*packages: str) -> tuple[list[str], set[str]]:
    command = [sys.executable, "-c", IMPORT_ALL, *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names, loaded = json.loads(done.stdout.splitlines()[-1])
    return names, set(loaded)


def test_the_scheduler_is_pure_python() -> None:
    names, loaded = _import_all("outrider.scheduler")
    assert "outrider.scheduler.scheduler" in names
    assert loaded.isdisjoint({"torch", "numpy", "ray", "grpc"})


# What a folder may import of ours, besides itself and `outrider.errors`.
DIRECTIONS = {
    "scheduler": ("outrider.added_fields",),
    "kernels": (),
    "src/outrider/links": (
        *("outrider.scheduler.types", "outrider.scheduler.params", "outrider.scheduler.costs"),
        "outrider.added_fields",
    ),
    "workers": (
        *("outrider.kernels", "outrider.scheduler.types", "outrider.scheduler.params"),
        *("outrider.scheduler.proposers", "outrider.scheduler.costs"),
        *("outrider.links", "outrider.logs", "outrider.log_stream", "outrider.garbage"),
        *("outrider.stages", "outrider.requirements"),
    ),
    "src/outrider/text": (
        *("outrider.config", "outrider.links.gateway_messages", "outrider.kernels.seeds"),
        *("outrider.scheduler", "outrider.workers.weights"),
        "outrider.workers.proposers.registry",  # names, no tensors
    ),
    "gateway": (
        *("outrider.proto", "outrider.config", "outrider.logs", "outrider.__version__"),
        *("outrider.text", "outrider.links", "outrider.garbage"),
        *("outrider.log_stream", "outrider.quiet_log"),
        *("outrider.scheduler.params", "outrider.scheduler.types"),
        "outrider.workers.proposers.registry",
    ),
    "train": (
        *("outrider.engine.llm", "outrider.text", "outrider.progress"),
        *("outrider.scheduler.params", "outrider.workers.models", "outrider.workers.weights"),
        "outrider.kernels",
        "outrider.bench.load.files",  # reads prompts, whoever they are for
    ),
    "src/outrider/engine": (
        *("outrider.scheduler", "outrider.workers", "outrider.kernels"),
        *(
            "outrider.added_fields",
            "outrider.config",
            "outrider.garbage",
            "outrider.logs",
            "outrider.progress",
            "outrider.quiet_log",
            "outrider.stages",
            "outrider.links",
            "outrider.text",
        ),
    ),
}


@pytest.mark.parametrize("folder", DIRECTIONS)
def test_imports_follow_the_direction_of_dependency(folder: str) -> None:
    own = "outrider." + folder.removeprefix("src/outrider/")
    allowed = ("outrider.errors", own, *DIRECTIONS[folder])
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in _imports(path)
        if name.startswith("outrider") and not name.startswith(allowed)
    ]
    assert wrong == []


def _imports(path: Path) -> Iterator[str]:
    """Every module, or name in one, that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_an_engine_whose_models_are_elsewhere_needs_no_tensors() -> None:
    modules = (
        "outrider.engine.build, outrider.engine.hosting, outrider.engine.preflight, "
        "outrider.gateway.server"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import {modules}, sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False", done.stderr


def test_only_the_cluster_imports_ray_and_no_engine_code_imports_grpc() -> None:
    names, loaded = _import_all("outrider.kernels", "outrider.workers", "outrider.engine")
    assert {"outrider.workers.target", "outrider.engine.llm"} <= set(names)
    assert loaded.isdisjoint({"ray", "grpc"})


def test_importing_the_package_alone_is_free() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import outrider, sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False", done.stderr
