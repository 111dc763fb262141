"""Choosing and compiling: the C kernels where they can run, plain torch elsewhere."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from c_kernels import skip_without_compiler

from outrider.kernels.cpu import build
from outrider.kernels.cpu.compiling import FLAGS, Compiler
from outrider.kernels.errors import KernelUnavailableError
from outrider.kernels.ops import select_ops

CPU = torch.device("cpu")
SOURCE = Path(__file__).resolve().parents[3] / "src"


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


def test_the_torch_backend_can_be_selected() -> None:
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


IN_A_PROCESS = """
from outrider.kernels.cpu import build
from outrider.kernels.cpu.compiling import FLAGS, Compiler
print(*[build.library_path(print), build.library_path(print)], sep="\\n")
"""


@pytest.mark.thorough
def test_processes_that_start_together_compile_once_and_leave_no_debris(
    needs_compiler: None, tmp_path: Path
) -> None:
    environment = os.environ | {"OUTRIDER_CACHE": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", IN_A_PROCESS]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=300)[0].splitlines() for process in started]
    (path,) = (tmp_path / "kernels").iterdir()
    assert all(lines[-2:] == [str(path), str(path)] for lines in said)
    num_files = len(list(build._SOURCE_DIR.glob("*.c")))
    steps = [f"compiling CPU kernels ({n} of {num_files})" for n in range(num_files + 1)]
    steps_seen = sorted(lines[:-2] for lines in said)
    assert steps in steps_seen, "one process compiles, file by file"
    waiting = "waiting for another process to compile the CPU kernels"
    assert all(set(lines) <= {waiting} for lines in steps_seen if lines != steps), "the others wait"


def slow_compiler(folder: Path, pids: Path) -> str:
    """One that does not come to an end, and writes down which process it is."""
    program = folder / "cc"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\necho $$ >>{pids}\nsleep 600\n")
    program.chmod(0o755)
    return str(program)


def running_groups() -> set[int]:
    """Process groups with a process that has not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                found.add(int(group))
    return found


def test_a_compilation_that_is_stopped_leaves_neither_processes_nor_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    pids = tmp_path / "pids"
    compiler = Compiler(slow_compiler(tmp_path, pids))
    with ThreadPoolExecutor() as threads:
        compiling = threads.submit(build.library_path, lambda _: None, compiler)
        while not pids.exists() or not pids.read_text().endswith("\n"):
            time.sleep(0.01)
        compiler.stop()
        with pytest.raises(KernelUnavailableError):
            compiling.result(timeout=30)
    groups = {int(pid) for pid in pids.read_text().split()}
    deadline_s = time.monotonic() + 30
    while left := groups & running_groups():
        assert time.monotonic() < deadline_s, left
        time.sleep(0.01)
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="paths of x86-64")
def test_only_paths_that_the_machine_has_are_compiled(
    needs_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a CPU without AVX-512 compiles them, seen from one that may have it."""
    flags = [flag.replace("-march=native", "-march=haswell") for flag in FLAGS]
    for name, is_there in (("quant_avx512", False), ("quant_wide512", False), ("quant_avx2", 1)):
        made = tmp_path / f"{name}.o"
        source = str(build._SOURCE_DIR / f"{name}.c")
        subprocess.run(["cc", *flags, "-c", source, "-o", str(made)], check=True)
        assert (name.encode() in made.read_bytes().replace(f"{name}.c".encode(), b"")) == is_there


def test_other_sources_give_another_library(
    needs_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.library_path()
    monkeypatch.setattr(build, "_cpu_model", lambda: "another machine")
    monkeypatch.setattr(build, "_compile", lambda *_: None)
    assert build.library_path() != before
