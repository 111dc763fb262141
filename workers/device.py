"""Where a model runs: device, dtype, kernels, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from outrider.errors import ConfigError
from outrider.kernels.ops import KernelUnavailableError, Ops, select_ops
from outrider.progress_stages import stage

# Reserved for activations on the GPU of a rank process; passes of usual sizes need less.
# An engine with its models in-process measures instead (`outrider.workers.gpu.memory`).
ACTIVATION_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Placement:
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    keeps_stored_format: bool = False  # weights stay quantized as stored, where the kernels can


def place(
    device_name: str, dtype_name: str, cpu_kernels: str, deterministic: bool, role: str
) -> Placement:
    """Resolve "auto" for this machine; `role` names the settings in an error."""
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{role}.device is {device_name!r} but there is no CUDA device; set it to cpu."
        )
    keeps_stored_format = dtype_name == "auto"
    if keeps_stored_format:
        dtype_name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, dtype_name)
    backend = None if cpu_kernels == "auto" else cpu_kernels
    try:
        with stage("preparing the kernels") as update:
            ops = select_ops(device, dtype, deterministic, backend, update)
    except KernelUnavailableError as error:
        raise ConfigError(f"cpu_kernels is {cpu_kernels!r}: {error}") from error
    return Placement(device, dtype, ops, keeps_stored_format)


def gpu_bytes(device: torch.device) -> int | None:
    """Total memory of a GPU; None for a CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def gpu_uuid(device: torch.device) -> str | None:
    """Names a GPU in all processes; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def free_kv_bytes(device: torch.device, utilization: float) -> int:
    """Memory left for KV on a rank's GPU once weights are loaded."""
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return max(int(total * utilization) - used - ACTIVATION_BYTES, 0)


def take_cores(num_threads: int | None, host_share: int, host_index: int) -> None:
    """Use `num_threads` CPU threads, or an equal part of the cores that `host_share` ranks share.

    Ranks synchronise many times a pass, so they are pinned to separate cores: two on one core block
    each other until the kernel migrates one, which takes milliseconds.
    """
    cores = sorted(os.sched_getaffinity(0))
    if num_threads is not None or len(cores) < host_share:
        torch.set_num_threads(num_threads or 1)
        return
    first, end = (len(cores) * (host_index + i) // host_share for i in (0, 1))
    torch.set_num_threads(end - first)
    if host_share > 1:
        os.sched_setaffinity(0, cores[first:end])
