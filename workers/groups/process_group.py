"""Process groups made from a store and a name, without torch's global state.

A process may be in several at once (its tensor-parallel group, the group that carries proposals),
leave one when the other side dies, and join its successor under a new name.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from outrider.kernels.cpu.ops import CpuOps
from outrider.workers.device import Placement
from outrider.workers.groups.collective import Collective, SingleRankGroup
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.groups.shared_memory import SharedMemoryGroup, meet_in_memory
from outrider.workers.models.shard import Shard

logger = logging.getLogger(__name__)

dist: Any = distributed  # torch.distributed lacks type information

Group: TypeAlias = Any
"""A `torch.distributed.ProcessGroupNCCL` or `ProcessGroupGloo`."""

GROUP_TIMEOUT_S = 60.0
# A failed communicator is aborted and raises; by default NCCL's watchdog kills the process.
_NCCL_ABORTS_ONLY_ITSELF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}


def make_group(store: LinkStore, name: str, rank: int, size: int, device: torch.device) -> Group:
    """Join the other ranks under `name`: NCCL for CUDA devices, Gloo for CPUs.

    The store must live as long as the group: NCCL reads it again later, and torch keeps only its
    C++ part alive.
    """
    prefixed = dist.PrefixStore(name, store)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if device.type == "cuda":
        os.environ.update(_NCCL_ABORTS_ONLY_ITSELF)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=store.own_host)]
    return dist.ProcessGroupGloo(prefixed, rank, size, gloo)


class TensorParallelGroup:
    """The collectives of one model's ranks; see `outrider.workers.groups.collective.Collective`."""

    def __init__(
        self,
        store: LinkStore,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._group = make_group(store, name, rank, size, device)
        self.backend: str = self._group.name()
        # A sum in rank order is the same for every number of rows; a ring's is not. With two ranks
        # there is only one order.
        self._in_rank_order = deterministic and size > 2

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self._in_rank_order:
            parts = self.all_gather(tensor)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape], in rank order."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._group.allgather([list(gathered.unbind(0))], [tensor.contiguous()]).wait()
        return gathered

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite `tensor` on every rank by that of `root`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()


def tensor_parallel_group(
    store: LinkStore, name: str, rank: int, size: int, placement: Placement, deterministic: bool
) -> Collective:
    """The fastest group these ranks can form; all ranks choose the same.

    NCCL on GPUs. On CPUs shared memory where all ranks are on one host and have the C kernels,
    Gloo elsewhere.
    """
    device = placement.device
    if device.type == "cpu":
        prefixed = dist.PrefixStore(f"{name}/memory", store)
        ops = placement.ops if isinstance(placement.ops, CpuOps) else None
        group = meet_in_memory(prefixed, rank, size, ops, GROUP_TIMEOUT_S)
        logger.info("tensor-parallel all-reduce: %s", "Gloo" if group is None else "shared memory")
        if group is not None:
            return group
    return TensorParallelGroup(store, name, rank, size, device, deterministic)


def shard_of(group: Collective) -> Shard:
    """The part of a model that this rank holds."""
    if group.size == 1:
        return Shard()
    is_kernel = isinstance(group, SharedMemoryGroup)
    return Shard(group.rank, group.size, group.all_reduce, is_repeatable=is_kernel)


def can_capture(group: Collective) -> bool:
    """Whether a CUDA graph can capture this group's collectives: NCCL's are kernels on the device,
    Gloo's and those in shared memory run on the host."""
    if isinstance(group, TensorParallelGroup):
        return group.backend == "nccl"
    return isinstance(group, SingleRankGroup)
