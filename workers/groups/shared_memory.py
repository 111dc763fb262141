"""A tensor-parallel group whose ranks share memory: CPU ranks of one host.

A pass of a small model has about sixty all-reduces, and one over sockets takes longer than the work
between two of them. In shared memory it takes microseconds, and can be part of a replayed pass.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.kernels.cpu.ops import CpuOps
from outrider.kernels.cpu.shared import NO_PROCESS, SharedEnd, memory_bytes

_DECLINED = ""
_NAME = "outrider-tensor-parallel"
_MODE = 0o600


class KeyValueStore(Protocol):
    """The part of a `torch.distributed` store used here; `get` waits for the key."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class SharedMemoryGroup:
    """A `Collective` whose all-reduce is a kernel, so that passes with it can be replayed."""

    def __init__(
        self, ops: CpuOps, memory: mmap.mmap, rank: int, process_ids: Sequence[int], limit_s: float
    ) -> None:
        self.rank = rank
        self.size = len(process_ids)
        processes = [
            NO_PROCESS if peer == rank else _open_process(process_id)
            for peer, process_id in enumerate(process_ids)
        ]
        weakref.finalize(self, _close, processes)
        self._end = SharedEnd(ops, memory, rank, processes, limit_s)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks in rank order; in place for float32."""
        if tensor.dtype is torch.float32:
            return self._end.all_reduce(tensor.contiguous())
        parts = self.all_gather(tensor)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._end.all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._end.broadcast(tensor, root)


def meet_in_memory(
    store: KeyValueStore, rank: int, size: int, ops: CpuOps | None, limit_s: float
) -> SharedMemoryGroup | None:
    """The group if every rank has the kernels and can map the same memory; else None on all ranks.

    The memory has no name in any file system: it is freed with the last process that maps it.
    """
    with _offered_memory(store, rank, size) as memory:
        can_join = ops is not None and memory is not None
        store.set(f"joined/{rank}", str(os.getpid()) if can_join else _DECLINED)
        # The first rank's offer must stay valid until all have answered.
        joined = [store.get(f"joined/{peer}").decode() for peer in range(size)]
    if ops is None or memory is None or _DECLINED in joined:
        return None
    return SharedMemoryGroup(ops, memory, rank, [int(pid) for pid in joined], limit_s)


@contextmanager
def _offered_memory(store: KeyValueStore, rank: int, size: int) -> Iterator[mmap.mmap | None]:
    """The memory that the first rank offers, mapped here; None if that fails."""
    if rank > 0:
        yield _map_offer(json.loads(store.get("offer")), memory_bytes(size))
        return
    descriptor = _allocate(memory_bytes(size))
    if descriptor is None:
        store.set("offer", json.dumps(None))
        yield None
        return
    try:
        store.set("offer", json.dumps(_offer(descriptor)))
        yield mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _allocate(num_bytes: int) -> int | None:
    """The file descriptor of new shared memory; None if the system cannot provide it."""
    try:
        descriptor = os.memfd_create(_NAME)
    except (AttributeError, OSError):
        return None
    try:
        os.fchmod(descriptor, _MODE)
        os.posix_fallocate(descriptor, 0, num_bytes)  # fail now, not in a pass
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _offer(descriptor: int) -> dict[str, Any]:
    return {
        "host": _host(),
        "process": os.getpid(),
        "descriptor": descriptor,
        "file": _identity(descriptor),
    }


def _map_offer(offer: dict[str, Any] | None, num_bytes: int) -> mmap.mmap | None:
    """Map the offered memory, but only if it was made for this purpose by this user.

    The offer names a descriptor, not a path.
    """
    if offer is None or offer["host"] != _host():
        return None
    try:
        path = f"/proc/{int(offer['process'])}/fd/{int(offer['descriptor'])}"
        if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
            return None  # checked before opening: opening some files has side effects
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        # Machines started from one snapshot may share even a boot id.
        is_same = _identity(descriptor) == offer["file"] and _is_ours(descriptor, num_bytes)
        return mmap.mmap(descriptor, num_bytes) if is_same else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int, num_bytes: int) -> bool:
    """Checked again after opening: the descriptor may have been replaced meanwhile."""
    status = os.fstat(descriptor)
    is_private = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == _MODE
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    is_named = name == f"/memfd:{_NAME} (deleted)"
    return is_private and is_named and status.st_uid == os.geteuid() and status.st_size == num_bytes


def _identity(descriptor: int) -> list[int]:
    status = os.fstat(descriptor)
    return [status.st_dev, status.st_ino, status.st_size]


def _host() -> str:
    """Identifies the processes that share `/proc`: same boot, same PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.getpid()}"


def _open_process(process_id: int) -> int:
    """A pidfd to notice the end of the process; without one, its absence is polled."""
    try:
        return os.pidfd_open(process_id)
    except (AttributeError, OSError):
        return NO_PROCESS


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor != NO_PROCESS:
            os.close(descriptor)
