"""Compiled code in a cache: only this user's and root's is loaded, and only as it was written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from c_kernels import skip_without_compiler

from outrider.kernels import ops
from outrider.kernels.cpu import build
from outrider.kernels.errors import KernelUnavailableError

OTHER_USER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


class Cache:
    """An empty one; what would be compiled is copied, which takes less time."""

    def __init__(self, root: Path, good: Path) -> None:
        self.root = root
        self.compiled: list[Path] = []
        self._good = good

    def compile(self, compiler: object, path: Path, on_progress: object) -> None:
        self.compiled.append(path)
        scratch = path.with_suffix(".new")
        shutil.copy(self._good, scratch)
        scratch.replace(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    skip_without_compiler()
    found = Cache(tmp_path / "cache", build.library_path())
    monkeypatch.setattr(build, "_compile", found.compile)
    monkeypatch.setenv("OUTRIDER_CACHE", str(found.root))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return found


def test_a_library_is_compiled_once_and_loaded_by_what_was_checked(cache: Cache) -> None:
    names = {build.load_library() for _ in range(3)}
    (name,) = names
    assert len(cache.compiled) == 1
    assert name.parent == Path("/proc/self/fd") and name.resolve() == build.library_path()
    build.library_path().unlink()
    cache.compiled.clear()
    assert build.load_library() != name, "another file, another name"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _seal_garbage(path: Path) -> None:
    path.write_bytes(b"\x7fELF of another machine")
    build.seal(path)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _garble,
        _seal_garbage,
        lambda path: path.write_bytes(b""),
        lambda path: path.chmod(0o777),
        lambda path: path.chmod(0o775),
        lambda path: (path.rename(path.with_suffix(".far")), path.symlink_to(path.stem + ".far")),
        pytest.param(lambda path: os.chown(path, OTHER_USER, OTHER_USER), marks=needs_root),
    ],
)
def test_a_library_that_is_damaged_or_not_ours_is_compiled_anew(
    cache: Cache, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = build.library_path()
    damage(path)
    cache.compiled.clear()
    with caplog.at_level("WARNING", "outrider"):
        assert build.load_library().resolve() == path
    assert cache.compiled == [path]
    (message,) = caplog.messages
    assert message.startswith("the CPU kernels are compiled again: ")
    found = path.lstat()
    assert (found.st_uid, found.st_mode & 0o7777) == (os.geteuid(), 0o755)
    build.load_library()
    assert cache.compiled == [path], "once"


def test_one_that_does_not_load_when_it_is_new_is_given_up(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_garbage(compiler: object, path: Path, on_progress: object) -> None:
        cache.compiled.append(path)
        _seal_garbage(path)

    monkeypatch.setattr(build, "_compile", compile_garbage)
    with pytest.raises(KernelUnavailableError, match="the compiled kernels do not load"):
        build.load_library()
    assert len(cache.compiled) == 2
    assert ops.select_ops(torch.device("cpu"), torch.float32).name == "torch"


def _open_root(cache: Cache) -> None:
    cache.root.mkdir()
    cache.root.chmod(0o777)


def _folder_of_another(cache: Cache) -> None:
    (cache.root / "kernels").mkdir(parents=True)
    os.chown(cache.root / "kernels", OTHER_USER, OTHER_USER)


def _root_of_another(cache: Cache) -> None:
    (cache.root / "kernels").mkdir(parents=True)
    os.chown(cache.root, OTHER_USER, OTHER_USER)


@pytest.mark.parametrize(
    "prepare",
    [
        _open_root,
        pytest.param(_folder_of_another, marks=needs_root),
        pytest.param(_root_of_another, marks=needs_root),
    ],
)
def test_a_folder_where_others_could_plant_code_is_not_used(
    cache: Cache, prepare: Callable[[Cache], None], tmp_path: Path
) -> None:
    prepare(cache)
    folder = build.library_path().parent
    assert folder == tmp_path / "tmp" / f"outrider-kernels-{os.geteuid()}"
    assert folder.stat().st_mode & 0o7777 == 0o700
    build.load_library()
    assert len(cache.compiled) == 1, "it is kept there"


@needs_root
def test_a_private_folder_that_another_user_has_made_is_not_used(
    cache: Cache, tmp_path: Path
) -> None:
    _open_root(cache)
    squatted = tmp_path / "tmp" / f"outrider-kernels-{os.geteuid()}"
    squatted.mkdir()
    os.chown(squatted, OTHER_USER, OTHER_USER)
    folder = build.library_path().parent
    assert folder != squatted and folder.parent == squatted.parent
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o7777) == (os.geteuid(), 0o700)


def test_our_own_folder_is_closed_to_others_and_used(cache: Cache) -> None:
    folder = cache.root / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    assert build.library_path().parent == folder
    assert folder.stat().st_mode & 0o7777 == 0o755


def test_a_tilde_in_the_cache_folder_is_the_home_folder(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OUTRIDER_CACHE", "~/kept")
    assert build.library_path().parent == tmp_path / "home" / "kept" / "kernels"


@pytest.mark.parametrize("is_open", [False, True])
def test_triton_is_kept_from_a_cache_that_others_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777 if is_open else 0o755)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared / "triton"))
    ops._keep_triton_cache_private()
    private = tmp_path / f"outrider-triton-{os.geteuid()}"
    assert os.environ["TRITON_CACHE_DIR"] == str(private if is_open else shared / "triton")
