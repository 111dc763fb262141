"""Conversations as token ids: binary shards, and the manifest that lists them.

A shard is: the magic, then as uint32 the number of records and the bytes of a token (2 or 4); of
every record its length and where the target's first answer begins (uint32 each) and its kind
(uint8, an index into the manifest's `kinds`); then the ids of all records, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from outrider.errors import ConfigError
from outrider.train.files import read_object, write_json, write_whole

MAGIC = b"OUTRDATA"
MANIFEST = "manifest.json"
VERSION = 1
HELD_OUT = "held-out.bin"
_COUNT_CHUNK = 1024  # records


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """One conversation; the target wrote all tokens from `begin` on."""

    ids: npt.NDArray[Any]
    begin: int
    kind: int


def write_shard(path: Path, records: Sequence[TrainingRecord], vocab_size: int) -> None:
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")

    def write(file: BinaryIO) -> None:
        file.write(MAGIC)
        np.array([len(records), dtype.itemsize], "<u4").tofile(file)
        np.array([len(record.ids) for record in records], "<u4").tofile(file)
        np.array([record.begin for record in records], "<u4").tofile(file)
        np.array([record.kind for record in records], "u1").tofile(file)
        for record in records:
            np.asarray(record.ids).astype(dtype).tofile(file)

    write_whole(path, write)


def read_shard(path: Path) -> list[TrainingRecord]:
    """Records whose ids are memory-mapped."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); make the data again.") from None
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise ConfigError(f"{path} is not a shard of token ids; make the data again.")
    at = len(MAGIC)

    def take(count: int, kind: str) -> npt.NDArray[Any]:
        nonlocal at
        size = count * np.dtype(kind).itemsize
        if at + size > len(data):
            raise ConfigError(f"{path} is cut short; make the data again.")
        part = data[at : at + size].view(kind)
        at += size
        return part

    count, itemsize = (int(value) for value in take(2, "<u4"))
    lengths, begins, kinds = take(count, "<u4"), take(count, "<u4"), take(count, "u1")
    ids = take(int(lengths.sum(dtype=np.int64)), "<u2" if itemsize == 2 else "<u4")
    ends = np.cumsum(lengths, dtype=np.int64)
    return [
        TrainingRecord(ids[int(end) - int(length) : int(end)], int(begin), int(kind))
        for end, length, begin, kind in zip(ends, lengths, begins, kinds, strict=True)
    ]


@dataclass(slots=True)
class Manifest:
    """The shards of a data folder, and the settings they were made with."""

    target: str
    vocab_size: int
    settings: dict[str, Any]
    kinds: list[str]
    shards: list[dict[str, Any]] = field(default_factory=list)
    has_held_out: bool = False
    is_complete: bool = False

    @property
    def num_records(self) -> int:
        return sum(int(shard["records"]) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(int(shard["tokens"]) for shard in self.shards)

    def save(self, folder: Path) -> None:
        contents = {name: getattr(self, name) for name in self.__slots__}
        write_json(folder / MANIFEST, {"version": VERSION, **contents})

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """None if the folder has none yet."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        contents = read_object(path, "a manifest of token ids")
        if contents.pop("version", None) != VERSION:
            raise ConfigError(
                f"{path} is of another version than {VERSION}; make the data again with --data "
                "naming another folder."
            )
        try:
            return cls(**contents)
        except TypeError:
            raise ConfigError(f"{path} is not a manifest of token ids; make it again.") from None


class Dataset:
    """The records of some folders: training and held-out ones."""

    def __init__(self, *folders: Path) -> None:
        self.manifests = [_manifest_of(folder) for folder in folders]
        self.kinds: list[str] = []
        self.records: list[TrainingRecord] = []
        self.held_out: list[TrainingRecord] = []
        for folder, manifest in zip(folders, self.manifests, strict=True):
            _check_alike(folder, manifest, self.manifests[0])
            for shard in manifest.shards:
                self.records += self._read(folder / str(shard["file"]), manifest)
            if manifest.has_held_out:
                self.held_out += self._read(folder / HELD_OUT, manifest)
        self.vocab_size = self.manifests[0].vocab_size
        if not self.records:
            names = ", ".join(map(str, folders))
            raise ConfigError(f"{names} holds no conversation yet; let the data be made first.")

    @property
    def num_tokens(self) -> int:
        return sum(manifest.num_tokens for manifest in self.manifests)

    def _read(self, path: Path, manifest: Manifest) -> list[TrainingRecord]:
        """Records with their kinds renumbered to indices into `kinds`."""
        for name in manifest.kinds:
            if name not in self.kinds:
                self.kinds.append(name)
        numbers = [self.kinds.index(name) for name in manifest.kinds]
        return [replace(record, kind=numbers[record.kind]) for record in read_shard(path)]

    def answer_counts(self) -> npt.NDArray[np.int64]:
        """How often the target wrote each token."""
        return count_tokens(self.records, self.vocab_size)


def _manifest_of(folder: Path) -> Manifest:
    manifest = Manifest.load(folder)
    if manifest is None:
        raise ConfigError(
            f"--data is {str(folder)!r}, which has no {MANIFEST}; let the data be made first "
            "(--phase data)."
        )
    return manifest


def _check_alike(folder: Path, manifest: Manifest, first: Manifest) -> None:
    for name in ("target", "vocab_size"):
        here, there = getattr(manifest, name), getattr(first, name)
        if here != there:
            raise ConfigError(
                f"{folder} has {name} {here!r}, and the first --data has {there!r}; give texts "
                "of one target."
            )


def count_tokens(records: Sequence[TrainingRecord], vocab_size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(records), _COUNT_CHUNK):
        chunk = records[first : first + _COUNT_CHUNK]
        answers = np.concatenate([record.ids[record.begin :] for record in chunk])
        counts += np.bincount(answers, minlength=vocab_size)
    return counts
