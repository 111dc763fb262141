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
from outrider.workers.weights.cache import boot_id, cache_folder, open_own

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
        self._handle = open_own(path)
        try:
            os.utime(self._handle)  # in use: not to be swept
            self._places = self._read_index(os.fstat(self._handle).st_size)
        except (struct.error, OSError, ValueError, RecursionError) as error:
            os.close(self._handle)
            raise ValueError(f"{path}: {error}") from None

    def _read_index(self, size: int) -> dict[str, tuple[int, int]]:
        """Offset and number of values of each tensor, all of them within the file."""
        length, mark = _END.unpack(os.pread(self._handle, _END.size, max(size - _END.size, 0)))
        if mark != _MARK or length > size - _END.size:
            raise ValueError("it has no end")
        index = json.loads(os.pread(self._handle, length, size - _END.size - length))
        if not isinstance(index, dict):
            raise ValueError("its index is none")
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
        _drop_scratches(path)
        # A new file: what another user, or a link, has put there is not written to.
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
        end = index + _END.pack(len(index), _MARK)
        with suppress(OSError):
            if os.pwrite(self._handle, end, self._size) == len(end):
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


def _drop_scratches(path: Path) -> None:
    """Of writers of the same file that were killed: who writes holds its lock."""
    for left in path.parent.glob(f"{path.stem}.*"):
        if left.suffix[1:].isdecimal():
            with suppress(OSError):
                left.unlink()


def _sweep(folder: Path) -> None:
    """Of other starts of the system, of checkpoints that are gone, of writers that were killed."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
