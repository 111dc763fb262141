"""A word in host memory that a CUDA stream waits for: work is enqueued before its input exists."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from functools import cache

import numpy as np
import torch

logger = logging.getLogger(__name__)

_WAIT_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, cyclic


class StreamWord:
    """The host counts it up; the stream continues once the count is reached. Meanwhile the device
    is free for other work: no kernel spins."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
        self._value = self._word.numpy().view(np.uint32)
        self._fence = threading.Lock()
        self._awaited = 0
        self.can_wait = is_cuda and self._works()

    def _works(self) -> bool:
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            return False  # the first launch behind a wait would not return
        try:
            self.wait()
        except (OSError, AttributeError, RuntimeError) as error:
            logger.warning("steps wait on the host, which takes longer: %s", error)
            return False
        self.release()
        return True

    def wait(self) -> None:
        """Enqueue a wait for the next `release`."""
        self._awaited = (self._awaited + 1) & 0xFFFFFFFF
        stream = torch.cuda.current_stream().cuda_stream
        arguments = ctypes.c_void_p(stream), ctypes.c_uint64(self._word.data_ptr())
        error = _driver().cuStreamWaitValue32_v2(
            *arguments, ctypes.c_uint32(self._awaited), ctypes.c_uint(_WAIT_AT_LEAST)
        )
        if error:
            raise RuntimeError(f"a CUDA stream cannot wait for a word: error {error}")

    def release(self) -> None:
        """What the host has written before is visible to the work that waits."""
        with self._fence:
            pass  # orders the writes
        self._value[0] = self._awaited


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
