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

# Imports every module below a package and prints which modules are loaded afterwards.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
names = []
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    found = pkgutil.walk_packages(package.__path__, root + ".")
    names += [importlib.import_module(module.name).__name__ for module in found]
print(json.dumps([names, sorted(sys.modules)]))
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


def test_catalog_and_checkpoints_need_neither_tensors_nor_workers() -> None:
    names, loaded = _import_all("outrider.catalog", "outrider.checkpoints")
    assert {"outrider.catalog.proposers", "outrider.checkpoints.resolve"} <= set(names)
    assert loaded.isdisjoint({"torch", "numpy", "transformers", "outrider.workers"})


def test_settings_and_text_load_no_workers() -> None:
    names, loaded = _import_all("outrider.config", "outrider.text")
    assert {"outrider.config.sections", "outrider.text.tokenizer"} <= set(names)
    assert loaded.isdisjoint({"torch", "outrider.workers"})


def test_only_the_catalog_names_the_kv_rule() -> None:
    """All others get it from the registration, so another rule holds everywhere."""
    folders = ("benchmarks", "kernels", "scheduler", "src/outrider", "train", "workers")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    naming = {
        file.resolve().relative_to(ROOT).as_posix()
        for file in files
        if "autoregressive_kv_rule" in file.read_text()
    }
    assert naming == {"scheduler/proposers.py", "src/outrider/catalog/proposers.py"}


# What a folder may import of ours, besides itself and `outrider.errors`.
DIRECTIONS = {
    "scheduler": ("outrider.compat_fields",),
    "kernels": (),
    "src/outrider/links": (
        *("outrider.scheduler.types", "outrider.scheduler.params", "outrider.scheduler.costs"),
        *("outrider.compat_fields", "outrider.rate_limited_log"),
    ),
    "src/outrider/catalog": ("outrider.scheduler.proposers",),
    "src/outrider/checkpoints": ("outrider.progress_stages", "outrider.requirements"),
    "workers": (
        *("outrider.catalog", "outrider.checkpoints"),
        *("outrider.kernels", "outrider.scheduler.types", "outrider.scheduler.params"),
        *("outrider.scheduler.proposers", "outrider.scheduler.costs"),
        *("outrider.links", "outrider.logs", "outrider.log_stream"),
        *("outrider.progress_stages", "outrider.requirements", "outrider.trace"),
    ),
    "src/outrider/testing": (
        *("outrider.catalog", "outrider.scheduler"),
        *("outrider.workers.rows", "outrider.workers.selection"),
        "outrider.workers.proposers.base",
    ),
    "src/outrider/config": (
        *("outrider.catalog", "outrider.checkpoints"),
        *("outrider.scheduler.params", "outrider.scheduler.policies"),
    ),
    "src/outrider/text": (
        *("outrider.config", "outrider.links.gateway_messages", "outrider.kernels.seeds"),
        *("outrider.scheduler", "outrider.catalog", "outrider.checkpoints"),
    ),
    "src/outrider/api_types": (
        *("outrider.proto", "outrider.links.cluster_view", "outrider.links.gateway_messages"),
        *("outrider.links.speculation", "outrider.scheduler.params", "outrider.scheduler.types"),
        *("outrider.text.messages", "outrider.text.outputs", "outrider.text.prompts"),
    ),
    "src/outrider/client": (
        *("outrider.api_types", "outrider.proto", "outrider.links.speculation"),
        *("outrider.scheduler.params", "outrider.text.messages", "outrider.text.outputs"),
        "outrider.text.prompts",
    ),
    "gateway": (
        *("outrider.api_types", "outrider.proto", "outrider.config"),
        *("outrider.logs", "outrider.__version__"),
        *("outrider.text", "outrider.links"),
        *("outrider.log_stream", "outrider.rate_limited_log", "outrider.catalog"),
        *("outrider.scheduler.params", "outrider.scheduler.types"),
    ),
    "train": (
        *("outrider.engine.llm", "outrider.text", "outrider.progress"),
        *("outrider.scheduler.params", "outrider.workers.models", "outrider.workers.weights"),
        *("outrider.kernels", "outrider.checkpoints"),
        *("outrider.input_files", "outrider.acceptance_tables"),
    ),
    "src/outrider/engine": (
        *("outrider.scheduler", "outrider.workers", "outrider.kernels"),
        *("outrider.catalog", "outrider.checkpoints"),
        *(
            "outrider.compat_fields",
            "outrider.config",
            "outrider.logs",
            "outrider.progress",
            "outrider.rate_limited_log",
            "outrider.progress_stages",
            "outrider.links",
            "outrider.restarts",
            "outrider.text",
            "outrider.trace",
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


def test_nothing_that_ships_imports_the_fakes() -> None:
    folders = ("cluster", "gateway", "kernels", "loadtest", "scheduler", "train", "workers")
    users = {
        path.relative_to(ROOT).as_posix()
        for folder in (*folders, "src/outrider")
        for path in (ROOT / folder).rglob("*.py")
        if any(name.startswith("outrider.testing") for name in _imports(path))
    }
    fakes = {file for file in users if file.startswith("src/outrider/testing/")}
    assert fakes and users == fakes


@pytest.mark.parametrize("folder", ["loadtest", "benchmarks"])
def test_no_measurement_imports_the_trainer(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in _imports(path)
        if name.startswith("outrider.train")
    ]
    assert wrong == []


def test_nothing_that_is_installed_imports_benchmarks() -> None:
    folders = ("cluster", "gateway", "kernels", "loadtest", "scheduler", "train", "workers")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in (*folders, "src/outrider")
        for path in (ROOT / folder).rglob("*.py")
        for name in _imports(path)
        if name.startswith("outrider.benchmarks")
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
        "outrider.gateway.grpc.server"
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
