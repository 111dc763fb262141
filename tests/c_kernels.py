"""The C kernels for tests: skipped only where no compiler is installed, never where ours fails."""

import shutil

import pytest
import torch

from outrider.kernels.ops import Ops, select_ops
from outrider.kernels.reference import ReferenceOps


def skip_without_compiler() -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("the C kernels need a C compiler (cc or gcc), and there is none on PATH")


def make_ops(kind: str) -> Ops:
    """Operations by name: "c", "torch" or "torch-deterministic"."""
    if kind != "c":
        return ReferenceOps(deterministic=kind == "torch-deterministic")
    skip_without_compiler()
    return select_ops(torch.device("cpu"), torch.float32, backend="c")
