"""What the gateway and its client load, seen from a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "outrider.client",
        "outrider.gateway.__main__",
        "outrider.cli.gateway, outrider.gateway.entrypoints",
        "outrider.cli.chat",
        "outrider.cluster.serve",  # whose cheap checks come before torch
    ],
)
def test_nothing_before_the_engine_loads_torch(module: str) -> None:
    heavy = {"torch", "ray", "transformers", "numpy"}
    script = f"import sys\nimport {module}\nprint(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
