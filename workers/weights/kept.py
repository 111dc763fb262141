"""Weights as kernels want them, kept in a file that ranks map instead of packing them again.

Every rank of a host that has the same share of the same checkpoint maps the same file, so the
memory is there once, and a rank that is started anew finds it there. A file holds until the system
is started anew: nobody waits for it to reach the disk, so it need not be whole afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from outrider.workers.models.shard import Shard
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.cache import boot_id, cache_folder

logger = logging.getLogger(__name__)

FORMAT_VERSION = "3"  # part of the name: raise it when what is written changes
LEAST_BYTES = 64 << 20  # less is packed sooner than anybody waits for it
UNUSED_S = 7 * 24 * 3600.0
_FREE_SHARE = 2  # of the file's size, so much must be free for it to be written
_END = struct.Struct("<Q8s")  # length of the index before it, mark
_MARK = b"OUTRIDER"
_ITEM = torch.float32.itemsize

Fill = Callable[[Tensor], None]


class KeptWeights:
    """A finished file of this user's. Raises `OSError` if there is none, `ValueError` if it is no
    such file: in a folder that others can write to, its name is no secret."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.utime(path)  # in use: not to be swept
            found = os.fstat(self._handle)
            if found.st_uid != os.geteuid():
                raise ValueError(f"it is of another user ({found.st_uid})")
            size = found.st_size
            length, mark = _END.unpack(os.pread(self._handle, _END.size, size - _END.size))
            if mark != _MARK:
                raise ValueError(f"{path} has no end")
            index = os.pread(self._handle, length, size - _END.size - length)
            self._places: dict[str, list[int]] = json.loads(index)
        except (struct.error, OSError, ValueError) as error:
            os.close(self._handle)
            raise ValueError(f"{path}: {error}") from None

    def tensor(self, name: str, num_values: int, fill: Fill) -> Tensor:
        offset, size = self._places[name]
        if size != num_values:
            raise ValueError(f"{name} has {size} values where {num_values} are needed")
        mapped = mmap.mmap(
            self._handle, size * _ITEM, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset
        )
        with warnings.catch_warnings():  # that it cannot be written to, which nobody does
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(mapped, dtype=torch.float32)

    def close(self) -> None:
        """What was mapped stays."""
        os.close(self._handle)


class WeightsWriter:
    """A file in the making: tensors are filled where they will be found. A disk that is too small
    for it makes them ordinary memory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._scratch = path.with_suffix(f".{os.getpid()}")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
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
            # A mapped page for which the disk has no room would end the process.
            os.posix_fallocate(self._handle, offset, size)
            mapped = mmap.mmap(self._handle, size, mmap.MAP_SHARED, offset=offset)
        except OSError as error:
            logger.info("weights cannot be kept in %s: %s", self._path.parent, error)
            self._is_whole = False
            return torch.empty(num_values, dtype=torch.float32)
        self._places[name] = offset, num_values
        self._size = offset + size
        return torch.frombuffer(mapped, dtype=torch.float32)

    def finish(self) -> None:
        """From now on others find it."""
        if not self._is_whole:
            return
        index = json.dumps(self._places).encode()
        with suppress(OSError):
            os.pwrite(self._handle, index + _END.pack(len(index), _MARK), self._size)
            os.replace(self._scratch, self._path)

    def close(self) -> None:
        os.close(self._handle)
        with suppress(OSError):  # it is finished
            self._scratch.unlink()


def kept_path(
    folder: Path, spec: ModelSpec, layout: str, shard: Shard, quantization: str | None
) -> Path | None:
    """Where the packed weights of a share of a checkpoint are, or may be put; None where they would
    be too small to be of use, or too large for the disk."""
    embedding = spec.vocab_size * spec.embed_size if spec.tied else 0
    num_bytes = _ITEM * (spec.num_params + embedding) // shard.size
    if num_bytes < LEAST_BYTES:
        return None
    digest = hashlib.blake2b(digest_size=16)
    share = (shard.rank, shard.size, quantization)
    digest.update(repr((FORMAT_VERSION, layout, boot_id(), share, str(folder))).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            found = path.stat()
            times = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            digest.update(repr((path.name, found.st_dev, found.st_ino, *times)).encode())
    kept = cache_folder() / "packed" / f"{digest.hexdigest()}.weights"
    if kept.exists():
        return kept
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        _sweep(kept.parent)
        if shutil.disk_usage(kept.parent).free >= _FREE_SHARE * num_bytes:
            return kept
    return None


def _sweep(folder: Path) -> None:
    """Of other starts of the system, of checkpoints that are gone, of writers that were killed."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
