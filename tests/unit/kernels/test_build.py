"""Choosing and compiling: the C kernels where they can run, plain torch elsewhere."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from c_kernels import skip_without_compiler

from outrider.kernels.cpu import build
from outrider.kernels.ops import select_ops
from outrider.kernels.types import KernelUnavailableError

CPU = torch.device("cpu")


@pytest.fixture
def needs_compiler() -> None:
    skip_without_compiler()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)


def test_the_c_kernels_are_the_default_for_float32_on_a_cpu(needs_compiler: None) -> None:
    assert select_ops(CPU, torch.float32).name == "c"


def test_other_dtypes_run_in_torch() -> None:
    assert select_ops(CPU, torch.bfloat16).name == "torch"


def test_torch_can_be_asked_for() -> None:
    ops = select_ops(CPU, torch.float32, deterministic=True, backend="torch")
    assert (ops.name, ops.deterministic) == ("torch", True)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match='"fortran" are unknown'):
        select_ops(CPU, torch.float32, backend="fortran")


def test_c_kernels_for_another_dtype_are_refused() -> None:
    with pytest.raises(KernelUnavailableError, match="float32"):
        select_ops(CPU, torch.bfloat16, backend="c")


def test_without_a_compiler_torch_takes_over_with_one_hint(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="outrider"):
        ops = select_ops(CPU, torch.float32)
    assert ops.name == "torch"
    assert [r.message for r in caplog.records if "no C compiler" in r.message]
    assert len(caplog.records) == 1


def test_without_a_compiler_asking_for_c_fails(no_compiler: None) -> None:
    with pytest.raises(KernelUnavailableError, match="no C compiler"):
        select_ops(CPU, torch.float32, backend="c")


def test_a_failing_compiler_is_reported_with_its_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(broken))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KernelUnavailableError, match="out of order"):
        build.library_path()
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported(
    needs_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(KernelUnavailableError, match="cannot be written"):
        build.library_path()


@pytest.mark.thorough
def test_the_library_is_compiled_once_and_left_without_debris(
    needs_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    path = build.library_path()
    written = path.stat().st_mtime_ns
    assert build.library_path() == path and path.stat().st_mtime_ns == written
    assert list(path.parent.iterdir()) == [path]


def test_other_sources_give_another_library(
    needs_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.library_path()
    monkeypatch.setattr(build, "_cpu_model", lambda: "another machine")
    monkeypatch.setattr(build, "_compile", lambda *_: None)
    assert build.library_path() != before
