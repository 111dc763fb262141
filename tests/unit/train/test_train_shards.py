"""Token ids on disk: what is written is read, and what is damaged is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.train.files import write_whole
from outrider.train.shards import Dataset, Manifest, TrainingRecord, read_shard, write_shard

RECORDS = [
    TrainingRecord(np.array([5, 6, 7, 8]), 2, 1),
    TrainingRecord(np.array([1]), 0, 0),
    TrainingRecord(np.array([9, 5, 5]), 1, 0),
]


def saved(folder: Path, vocab_size: int = 10) -> Manifest:
    write_shard(folder / "shard-00000.bin", RECORDS, vocab_size)
    manifest = Manifest("toy", vocab_size, {}, ["a", "b"])
    manifest.shards.append({"file": "shard-00000.bin", "records": 3, "tokens": 8})
    manifest.save(folder)
    return manifest


@pytest.mark.parametrize("vocab_size", [10, 2**16, 2**16 + 1])
def test_records_are_read_as_they_were_written(vocab_size: int, tmp_path: Path) -> None:
    saved(tmp_path, vocab_size)
    read = Dataset(tmp_path).records
    assert [(r.ids.tolist(), r.begin, r.kind) for r in read] == [
        (r.ids.tolist(), r.begin, r.kind) for r in RECORDS
    ]
    assert read[0].ids.itemsize == (2 if vocab_size <= 2**16 else 4)


def test_only_what_the_target_wrote_is_counted(tmp_path: Path) -> None:
    saved(tmp_path)
    counts = Dataset(tmp_path).answer_counts()
    assert counts.tolist() == [0, 1, 0, 0, 0, 2, 0, 1, 1, 0]


@pytest.mark.parametrize("size", [0, 5, 20, -1])
def test_a_shard_that_is_cut_short_is_refused(size: int, tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match="make the data again"):
        read_shard(path)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no manifest.json; let the data be made first"):
        Dataset(tmp_path)


def test_a_file_whose_writing_fails_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail(file: object) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_whole(path, fail)
    assert path.read_text() == "before"


def test_several_folders_are_one_set_with_kinds_of_their_names(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    saved(first)
    manifest = saved(second)
    manifest.kinds = ["b", "c"]
    manifest.save(second)
    data = Dataset(first, second)
    assert len(data.records) == 6 and data.num_tokens == 16
    assert [data.kinds[r.kind] for r in data.records] == ["b", "a", "a", "c", "b", "b"]


def test_folders_of_two_targets_are_not_mixed(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    saved(tmp_path / "b", vocab_size=11)
    with pytest.raises(ConfigError, match="has vocab_size 11, and the first --data has 10; give"):
        Dataset(tmp_path / "a", tmp_path / "b")
