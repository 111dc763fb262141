"""Shared by every test: child processes must find the package too (pytest's `pythonpath` does not
reach them), and nothing may ask a model hub for anything."""

import os
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees a GPU: everything else expects the CPU, where float32 is the default and
    GPU kernels run in Triton's interpreter, which must be chosen before Triton is imported."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
