"""Counts the GPUs of this host. Imports PyTorch, which takes seconds, only if there is a driver."""

from __future__ import annotations

import os
from pathlib import Path

# NVIDIA, WSL, AMD.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))


def has_gpu_driver() -> bool:
    """Whether PyTorch might find a GPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(path.exists() for path in _DRIVERS)


def num_gpus() -> int:
    """The number of GPUs that PyTorch finds."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()
