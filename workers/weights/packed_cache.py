"""On-disk cache of packed weights: ranks map a file instead of packing their weights again.

All ranks of a host with the same share of the same checkpoint map the same file, so the memory is
used once, and a restarted rank finds it there. A file is valid until the host reboots: it is not
fsynced, so it may be incomplete afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoints.cache import boot_id, cache_folder, open_own, sweep
from outrider.workers.models.shard import Shard
from outrider.workers.models.spec import ModelSpec

logger = logging.getLogger(__name__)

FORMAT_VERSION = "4"  # part of the name: raise it when what is written changes
MIN_BYTES = 64 << 20  # packing less takes no noticeable time
_FREE_SHARE = 2  # times the file's size must be free to write it
_END = struct.Struct("<Q8s")  # length of the index before it, mark
_MARK = b"OUTRIDER"
_ITEM = torch.float32.itemsize

Fill = Callable[[Tensor], None]


class PackedWeights:
    """A complete file of this user. Raises `OSError` if there is none, `ValueError` if it is
    invalid: other users may create a file of this name in a shared folder."""

    def __init__(self, path: Path) -> None:
        self._handle = open_own(path)
        try:
            os.utime(self._handle)  # in use: do not sweep
            self._places = self._read_index(os.fstat(self._handle).st_size)
        except (struct.error, OSError, ValueError, RecursionError) as error:
            os.close(self._handle)
            raise ValueError(f"{path}: {error}") from None

    def _read_index(self, size: int) -> dict[str, tuple[int, int]]:
        """Offset and number of values of each tensor, checked to be within the file."""
        length, mark = _END.unpack(os.pread(self._handle, _END.size, max(size - _END.size, 0)))
        if mark != _MARK or length > size - _END.size:
            raise ValueError("it has no end")
        index = json.loads(os.pread(self._handle, length, size - _END.size - length))
        if not isinstance(index, dict):
            raise ValueError("its index is not a dictionary")
        for name, place in index.items():
            is_place = isinstance(place, list) and [type(each) for each in place] == [int, int]
            if not is_place or min(place) < 0 or place[0] + place[1] * _ITEM > size:
                raise ValueError(f"{name} is at {place} of {size} bytes")
        return index

    def tensor(self, name: str, num_values: int, fill: Fill) -> Tensor:
        offset, size = self._places[name]
        if size != num_values:
            raise ValueError(f"{name} has {size} values where {num_values} are needed")
        mapped = mmap.mmap(
            self._handle, size * _ITEM, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset
        )
        with warnings.catch_warnings():  # the tensor is read-only, and never written
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(mapped, dtype=torch.float32)

    def close(self) -> None:
        """Close the file; mapped tensors stay valid."""
        os.close(self._handle)


class PackedWeightsWriter:
    """Writes a new file: tensors are filled in mapped memory. If the disk is full, they are filled
    in ordinary memory instead."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._scratch = path.with_suffix(f".{os.getpid()}")
        _drop_scratches(path)
        # O_EXCL: never write to a file or link of another user.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(self._scratch, flags, 0o600)
        self._places: dict[str, tuple[int, int]] = {}
        self._size = 0
        self._is_whole = True

    def tensor(self, name: str, num_values: int, fill: Fill) -> Tensor:
        out = self._mapped(name, num_values)
        fill(out)
        return out

    def _mapped(self, name: str, num_values: int) -> Tensor:
        size = num_values * _ITEM
        offset = -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            # Reserve space: writing a mapped page to a full disk kills the process.
            os.posix_fallocate(self._handle, offset, size)
            mapped = mmap.mmap(self._handle, size, mmap.MAP_SHARED, offset=offset)
        except OSError as error:
            logger.info("cannot cache packed weights in %s: %s", self._path.parent, error)
            self._is_whole = False
            return torch.empty(num_values, dtype=torch.float32)
        self._places[name] = offset, num_values
        self._size = offset + size
        return torch.frombuffer(mapped, dtype=torch.float32)

    def finish(self) -> None:
        """Publish the file under its final name."""
        if not self._is_whole:
            return
        index = json.dumps(self._places).encode()
        end = index + _END.pack(len(index), _MARK)
        with suppress(OSError):
            if os.pwrite(self._handle, end, self._size) == len(end):
                os.replace(self._scratch, self._path)

    def close(self) -> None:
        os.close(self._handle)
        with suppress(OSError):  # already renamed
            self._scratch.unlink()


def packed_path(
    folder: Path, spec: ModelSpec, layout: str, shard: Shard, quantization: str | None
) -> Path | None:
    """The cache file for the packed weights of a share of a checkpoint; None if they are too small
    to be worth it, or too large for the disk."""
    embedding = spec.vocab_size * spec.embed_size if spec.tied else 0
    num_bytes = _ITEM * (spec.num_params + embedding) // shard.size
    if num_bytes < MIN_BYTES:
        return None
    digest = hashlib.blake2b(digest_size=16)
    share = (shard.rank, shard.size, quantization)
    digest.update(repr((FORMAT_VERSION, layout, boot_id(), share, str(folder))).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            status = path.stat()
            times = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            digest.update(repr((path.name, status.st_dev, status.st_ino, *times)).encode())
    cached = cache_folder() / "packed" / f"{digest.hexdigest()}.weights"
    if cached.exists():
        return cached
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        sweep(cached.parent)
        if shutil.disk_usage(cached.parent).free >= _FREE_SHARE * num_bytes:
            return cached
    return None


def _drop_scratches(path: Path) -> None:
    """Delete files of killed writers of the same file; the caller holds its lock."""
    for left in path.parent.glob(f"{path.stem}.*"):
        if left.suffix[1:].isdecimal():
            with suppress(OSError):
                left.unlink()
