"""Packed weights that are kept for the next process: bit for bit the same, and never of another
checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import with_kernels
from checkpoints import RaggedRun, random_prompt, save_checkpoint

from outrider.kernels.ops import select_ops
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Shard
from outrider.workers.weights import packed_cache as packed_cache_module
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32)
needs_packing = pytest.mark.skipif(OPS.packing is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", with_kernels(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache_module, "MIN_BYTES", 0)
    return tmp_path / "cache" / "packed"


def _load(folder: Path, *, keeps: bool = True, **options: Any) -> Decoder:
    return load_model(
        folder, dtype=torch.float32, device=CPU, ops=OPS, cache_packed=keeps, **options
    )


def _logits(folder: Path, **options: Any) -> torch.Tensor:
    return RaggedRun(_load(folder, **options), [random_prompt(9)]).run(4)[0]


def _full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.fixture
def removed(tmp_path: Path, cache: Path) -> tuple[Path, bytes]:
    """A file that was kept and is gone, and what was in it. Not truncated: who has loaded it still
    has it mapped."""
    save_checkpoint(tmp_path / "model", "llama")
    _load(tmp_path / "model")
    path = cache / _files(cache)[0]
    whole = path.read_bytes()
    path.unlink()
    return path, whole


@needs_packing
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biases", "opt"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_was_kept_gives_the_same_logits_bit_for_bit_and_is_not_read_again(
    tmp_path: Path, cache: Path, read_names: list[str], variant: str, quantization: str | None
) -> None:
    save_checkpoint(tmp_path / "model", variant)
    options = {"quantization": quantization}
    expected = _logits(tmp_path / "model", keeps=False, **options)
    assert torch.equal(_logits(tmp_path / "model", **options), expected)
    assert len(_files(cache)) == 1
    read_names.clear()
    assert torch.equal(_logits(tmp_path / "model", **options), expected)
    assert [name for name in read_names if "positions" not in name] == []


@needs_packing
def test_every_rank_keeps_its_own_share(tmp_path: Path, cache: Path) -> None:
    save_checkpoint(tmp_path / "model", "llama")
    for _ in range(2):
        for rank in range(2):
            _load(tmp_path / "model", shard=Shard(rank, 2, lambda tensor: tensor))
    assert len(_files(cache)) == 2


@needs_packing
def test_a_checkpoint_that_was_replaced_is_read_anew(tmp_path: Path, cache: Path) -> None:
    save_checkpoint(tmp_path / "model", "llama", seed=0)
    before = _logits(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    save_checkpoint(tmp_path / "model", "llama", seed=1)
    found = _logits(tmp_path / "model")
    assert not torch.equal(found, before)
    assert torch.equal(found, _logits(tmp_path / "model", keeps=False))
    assert len(_files(cache)) == 2


@needs_packing
@pytest.mark.parametrize("length", [0, 5, -1])
def test_a_file_that_was_cut_short_is_written_anew(
    tmp_path: Path, removed: tuple[Path, bytes], length: int
) -> None:
    path, whole = removed
    path.write_bytes(whole[:length])
    _load(tmp_path / "model")
    assert path.read_bytes() == whole


def _end(index: object, length: int | None = None) -> bytes:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return text + packed_cache_module._END.pack(
        len(text) if length is None else length, packed_cache_module._MARK
    )


@needs_packing
@pytest.mark.parametrize(
    "end",
    [
        _end({}, 1 << 63),
        _end({}, 1 << 40),
        _end([]),
        _end(3),
        _end(b"[" * 100_000),
        _end({"model.embed_tokens.weight": None}),
        _end({"model.embed_tokens.weight": [-4096, 8]}),
        _end({"model.embed_tokens.weight": [0.5, 8]}),
        _end({"model.embed_tokens.weight": [1 << 62, 8]}),
    ],
)
def test_a_file_whose_end_is_damaged_is_written_anew(
    tmp_path: Path, removed: tuple[Path, bytes], end: bytes
) -> None:
    path, whole = removed
    path.write_bytes(whole + end)
    _load(tmp_path / "model")
    assert path.read_bytes() == whole


@needs_packing
def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(
    tmp_path: Path, removed: tuple[Path, bytes]
) -> None:
    path, whole = removed
    os.mkfifo(path)
    _load(tmp_path / "model")
    assert path.read_bytes() == whole


@needs_packing
def test_a_link_is_not_written_through_and_what_killed_writers_left_is_removed(
    tmp_path: Path, cache: Path, removed: tuple[Path, bytes]
) -> None:
    path, other = removed[0], tmp_path / "other"
    other.write_text("mine")
    path.with_suffix(f".{os.getpid()}").symlink_to(other)
    path.with_suffix(".1").write_text("left")
    _load(tmp_path / "model")
    assert other.read_text() == "mine"
    assert _files(cache) == [path.name]


@needs_packing
def test_a_lock_that_cannot_be_written_to_is_held_all_the_same(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "model", "llama")
    _load(tmp_path / "model")
    for lock in cache.glob("*.lock"):
        lock.unlink()
    monkeypatch.setattr(os, "pwrite", _full_disk)
    _load(tmp_path / "model")


@needs_packing
def test_a_file_that_another_user_has_put_there_is_not_used(
    tmp_path: Path, read_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "model", "llama")
    _load(tmp_path / "model")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    read_names.clear()
    _load(tmp_path / "model")
    assert read_names


@needs_packing
def test_a_disk_without_room_keeps_nothing_and_serves(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "model", "llama")
    expected = _logits(tmp_path / "model", keeps=False)
    monkeypatch.setattr(os, "posix_fallocate", _full_disk)
    assert torch.equal(_logits(tmp_path / "model"), expected)
    assert _files(cache) == []


def test_a_model_that_is_packed_in_no_time_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache_module, "MIN_BYTES", 1 << 30)
    save_checkpoint(tmp_path / "model", "llama")
    _load(tmp_path / "model")
    assert not cache.exists()
