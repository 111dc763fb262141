"""Selects a backend: the fastest one that runs on this machine, or the one requested."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from outrider.kernels.cpu.build import load_library
from outrider.kernels.cpu.ops import CpuOps
from outrider.kernels.errors import KernelUnavailableError
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.trust import trusted_folder
from outrider.kernels.types import Linear, Ops, RaggedBatch

__all__ = ["KernelUnavailableError", "Linear", "Ops", "RaggedBatch", "select_ops"]

logger = logging.getLogger(__name__)

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    backend: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Ops:
    """The operations for tensors of `dtype` on `device`.

    `backend` is "c" (float32 on CPUs, needs a C compiler once), "torch" (runs anywhere), or None
    for the best available: on GPUs the Triton kernels. `on_progress` gets the progress of a
    compilation.
    """
    if backend not in (None, "c", "torch"):
        raise ValueError(f'CPU kernels "{backend}" are unknown; use "c" or "torch".')
    suitable = device.type == "cpu" and dtype == torch.float32
    if backend == "c" and not suitable:
        raise KernelUnavailableError(
            f'CPU kernels "c" work on float32 on a CPU, not on {dtype} on {device.type};'
            ' use "torch".'
        )
    if backend is None and _runs_triton(device, dtype):
        # Imported only here: Triton is not installed on every machine.
        _keep_triton_cache_private()
        from outrider.kernels.gpu.ops import GpuOps

        return GpuOps(deterministic)
    if backend == "torch" or not suitable:
        return ReferenceOps(deterministic)
    try:
        return CpuOps(load_library(on_progress))
    except KernelUnavailableError as error:
        if backend == "c":
            raise
        logger.warning("CPU kernels run in plain torch, at about half the speed: %s", error)
        return ReferenceOps(deterministic)


def _keep_triton_cache_private() -> None:
    """Triton loads compiled code from its cache without checking who wrote it."""
    home = Path(os.environ.get("TRITON_HOME", "~"), ".triton", "cache")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home).expanduser()
    with suppress(OSError):  # Triton reports a folder it cannot create
        if (trusted := trusted_folder(folder, "triton")) != folder:
            os.environ["TRITON_CACHE_DIR"] = str(trusted)


def _runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in _GPU_DTYPES and find_spec("triton") is not None
