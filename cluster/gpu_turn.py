"""GPUs that another process had: it must be gone before the next one uses them.

Ray sees to that itself for actors that it has given GPUs, but not for spares, which have none of
its, and take those of whoever was lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from outrider.cluster.errors import ClusterError

_GPUS = "CUDA_VISIBLE_DEVICES"
# With it Ray hides all GPUs, call by call, from those it has given none.
_HIDES_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
_GONE_S = 20.0  # for the memory of a large model to be given back
_POLL_S = 0.02
_HAS_ENDED = "ZX"  # nothing of it is left but its exit code


def see_gpus(gpu_ids: Sequence[str]) -> None:
    """Have this process, which has not looked for any yet, see these only."""
    os.environ[_GPUS] = ",".join(gpu_ids)
    os.environ[_HIDES_GPUS] = "0"


def await_gone(pid: int, timeout_s: float = _GONE_S) -> None:
    """Wait until that process of this host holds no memory any more."""
    deadline_s = time.monotonic() + timeout_s
    while _is_running(pid):
        if time.monotonic() > deadline_s:
            raise ClusterError(
                f"process {pid} was killed and still has its GPUs after {timeout_s:g} s; see with "
                "nvidia-smi what it waits for."
            )
        time.sleep(_POLL_S)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in _HAS_ENDED
