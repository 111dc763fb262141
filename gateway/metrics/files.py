"""The memory-mapped metric files of a gateway process, as prometheus_client uses them.

The library extends a file sparsely. A write to a mapped page without a free disk block ends the
process by SIGBUS, so blocks are allocated before they are mapped. If that fails, the process counts
in its own memory: it serves on, and its counts are on its own page only.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
from typing import Any

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger(__name__)

FIRST_BYTES = 1 << 16  # as in the library
_USED = struct.Struct("i")
_HEAD_BYTES = 8  # before the first entry: the number of bytes in use
_ENTRY_BYTES = 32  # of an entry besides its key: length, padding, value and time

_in_memory: set[str] = set()  # names of files that this process has replaced by memory


def counts_in_memory() -> bool:
    """Whether any count of this process is in its memory only."""
    return bool(_in_memory)


class CountFile(MmapedDict):
    """A file whose blocks are allocated, or memory where that fails."""

    _f: Any
    _m: mmap.mmap
    _capacity: int
    _used: int

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        try:
            _allocate_new(filename)
            super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]
        except OSError as error:
            self._f, self._fname, self._positions = None, filename, {}
            self._m, self._used = mmap.mmap(-1, FIRST_BYTES), _HEAD_BYTES
            self._m[: _USED.size] = _USED.pack(self._used)
            self._move_to_memory(FIRST_BYTES, error)

    def _init_value(self, key: str) -> None:
        needed = self._used + len(key.encode()) + _ENTRY_BYTES
        capacity = self._capacity
        while capacity < needed:
            capacity *= 2
        if capacity > self._capacity:
            self._grow(capacity)
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _grow(self, capacity: int) -> None:
        failure = None
        if self._f is not None:
            try:
                # The library's descriptor is in append mode, where fallocate's fallback fails.
                with open(self._fname, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, capacity)
                    self._m = mmap.mmap(file.fileno(), capacity)
                self._capacity = capacity
                return
            except OSError as error:
                failure = error
                self._f.close()
                self._f = None
        self._move_to_memory(capacity, failure)

    def _move_to_memory(self, capacity: int, failure: OSError | None) -> None:
        content = self._m[:]
        self._m = mmap.mmap(-1, capacity)
        self._m[: len(content)] = content
        self._capacity = capacity
        if failure is not None and not _in_memory:
            logger.warning(
                "metrics of this process are counted in memory, because %s cannot be written: %s; "
                "free space there and restart the gateway to count in files again",
                os.path.dirname(self._fname),
                failure.strerror,
            )
        _in_memory.add(self._fname)


def _allocate_new(filename: str) -> None:
    """Created by rename: other processes read every file of the folder at any time."""
    if os.path.exists(filename):  # of an earlier process with the same pid
        with open(filename, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(os.fstat(file.fileno()).st_size, FIRST_BYTES))
        return
    scratch = f"{filename}.new"
    try:
        with open(scratch, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, FIRST_BYTES)
        os.rename(scratch, filename)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


# The library has no setting for its file class.
vars(values)["MmapedDict"] = CountFile
