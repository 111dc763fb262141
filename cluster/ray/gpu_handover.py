"""Hands GPUs from a lost process to its successor, which must wait until the first is gone.

Ray does this for actors that it gave GPUs, but spares have none from Ray: they take those of the
process they replace.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from outrider.cluster.errors import ClusterError

_GPUS = "CUDA_VISIBLE_DEVICES"
# If "1", Ray hides all GPUs from actors without GPU resources, at every call.
_HIDES_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
_GONE_S = 20.0  # for the driver to free a large model's memory
_POLL_S = 0.02
_HAS_ENDED = "ZX"  # zombie or dead


def set_visible_gpus(gpu_ids: Sequence[str]) -> None:
    """Restrict this process to these GPUs. Call before CUDA is initialised."""
    os.environ[_GPUS] = ",".join(gpu_ids)
    os.environ[_HIDES_GPUS] = "0"


def await_gone(pid: int, timeout_s: float = _GONE_S) -> None:
    """Wait until that process of this host has freed its memory."""
    deadline_s = time.monotonic() + timeout_s
    while _is_running(pid):
        if time.monotonic() > deadline_s:
            raise ClusterError(
                f"process {pid} was killed and still holds its GPUs after {timeout_s:g} s; inspect "
                "it with nvidia-smi."
            )
        time.sleep(_POLL_S)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in _HAS_ENDED
