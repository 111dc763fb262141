"""A counter in host memory that CUDA streams wait for and advance: work is enqueued before its
input exists, and another process may bring it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from functools import cache

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_WAIT_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, cyclic
_WRITE_AFTER_ALL = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what was enqueued before is visible
_MASK = 0xFFFFFFFF


class StreamCounter:
    """It only grows, over at most 2^31 counts. While a stream waits, the device is free for other
    work: no kernel spins."""

    def __init__(self, memory: Tensor) -> None:
        """`memory` is an int32 that the device can address."""
        self._address = memory.data_ptr()
        self._value = memory.numpy().view(np.uint32)
        self._fence = threading.Lock()
        self._awaited = 0

    def wait_for(self, count: int) -> None:
        """Enqueue a wait until it is `count` or more."""
        self._awaited = count
        _call("cuStreamWaitValue32_v2", self._address, count, _WAIT_AT_LEAST)

    def signal(self, count: int) -> None:
        """Enqueue setting it, after all that is enqueued."""
        _call("cuStreamWriteValue32_v2", self._address, count, _WRITE_AFTER_ALL)

    def advance(self, count: int) -> None:
        """Set it now. What the host has written before is visible to the work that waits."""
        with self._fence:
            pass  # a lock that nobody else takes is a memory barrier
        self._value[0] = count & _MASK

    def has_reached(self, count: int) -> bool:
        return (int(self._value[0]) - count) & _MASK <= _MASK >> 1

    def unblock(self) -> None:
        """Let what waits go on."""
        if not self.has_reached(self._awaited):
            self.advance(self._awaited)


@cache
def can_wait(device: torch.device) -> bool:
    """Whether streams of this device wait for counters."""
    # Blocking launches: the first one behind a wait would not return.
    if device.type != "cuda" or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return False
    counter = StreamCounter(torch.zeros(1, dtype=torch.int32, pin_memory=True))
    try:
        counter.signal(1)
        counter.wait_for(1)
    except (OSError, AttributeError, RuntimeError) as error:
        logger.warning("steps wait on the host, which takes longer: %s", error)
        return False
    torch.cuda.current_stream(device).synchronize()  # the counter must outlive its use
    return True


def _call(function: str, address: int, count: int, flags: int) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    error = getattr(_driver(), function)(
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(count & _MASK),
        ctypes.c_uint(flags),
    )
    if error:
        raise RuntimeError(f"{function} failed with error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
