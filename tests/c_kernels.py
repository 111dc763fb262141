"""The C kernels for tests: skipped only where no compiler is installed, never where ours fails."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from outrider.kernels.cpu.build import library_path
from outrider.kernels.errors import KernelUnavailableError
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


def with_kernels(cache: Path) -> str:
    """A cache folder of a test's own that has the compiled kernels: compiling takes 20 seconds."""
    cache.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError, KernelUnavailableError):  # there already, or no compiler
        (cache / "kernels").symlink_to(library_path().parent)
    return str(cache)
