"""A plain checkout runs beside a fixed set of packages: everything else is blocked here.

Only imports made by our own modules are judged; what torch or transformers pull in is theirs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ALLOWED = {
    *("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers"),
    *("rich", "typer", "yaml", "msgpack", "grpc", "google"),
}

BLOCK = (
    f"""
ALLOWED = {ALLOWED!r}
"""
    + """
import builtins, sys
real_import = builtins.__import__
allowed = set(sys.stdlib_module_names) | {"outrider"} | ALLOWED
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if importer.partition(".")[0] == "outrider" and name.partition(".")[0] not in allowed:
        raise ImportError(f"{importer} imports {name}")
    return real_import(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
"""
)

# The arguments are modules, or packages of which every module is meant.
IMPORT_ALL = """
import importlib, pkgutil
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), root + "."):
        importlib.import_module(module.name)
from outrider import LLM
"""


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.thorough
def test_engine_training_and_gpu_benches_import_with_everything_else_blocked() -> None:
    benches = [f"outrider.benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("gpu*.py")]
    benches.append("outrider.benchmarks.proposers")
    packages = ("outrider.workers", "outrider.kernels", "outrider.engine", "outrider.train")
    done = _run(IMPORT_ALL, *packages, *benches)
    assert done.returncode == 0, done.stderr


def test_the_block_refuses_a_package_that_is_not_on_the_list() -> None:
    """The proof that the test above can fail."""
    done = _run("exec('import gguf', {'__name__': 'outrider.workers.planted'})")
    assert "outrider.workers.planted imports gguf" in done.stderr


def test_the_block_lets_others_import_what_they_like() -> None:
    done = _run("exec('import wave, pytest', {'__name__': 'transformers.planted'})")
    assert done.returncode == 0, done.stderr
