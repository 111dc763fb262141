"""Collectives through shared memory: right to the bit, in step, and never stuck.

The ranks are processes that load the C library and nothing else, so that many can be started.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from random import Random

import pytest
import torch
from c_kernels import make_ops, skip_without_compiler

from outrider.kernels.cpu.build import library_path
from outrider.kernels.cpu.ops import CpuOps
from outrider.kernels.cpu.shared import NO_PROCESS, SharedEnd, memory_bytes
from outrider.kernels.types import RaggedBatch

BUFFER_BYTES = 1024
COUNTS = (1, 7, 255, 256, 257, 576, 3456)  # a buffer holds 256 floats

# What every rank of these groups starts with: `end` and the functions on it.
PROLOGUE = """
import ctypes, mmap, sys
from ctypes import addressof, c_char, c_int32
from random import Random
from outrider.kernels.cpu.native import CSharedEnd, bind, check
library, descriptor, rank, size, buffer_bytes, result = sys.argv[1:]
rank, size = int(rank), int(size)
c = bind(ctypes.CDLL(library))
memory = c_char.from_buffer(mmap.mmap(int(descriptor), 0))
processes = (c_int32 * size)(*[-1] * size)
end = CSharedEnd(
    addressof(memory), addressof(processes), rank, size, int(buffer_bytes), int(30e9)
)
"""

SUMS = """
written = b""
for count in map(int, result.split(":")[1].split(",")):
    draws = Random(f"{rank}/{count}")
    x = (ctypes.c_float * count)(*(draws.gauss(0, 10) for _ in range(count)))
    check(c.all_reduce(addressof(end), addressof(x), count))
    written += bytes(x)
open(f"{result.split(':')[0]}/{rank}", "wb").write(written)
"""

# A random sequence of operations, the same on every rank; every byte of every result is checked.
MIXED = """
choices = Random(3)
def mark(owner, step):
    return (17 * owner + step) % 251
for step in range(2000):
    kind, n = choices.randrange(3), choices.choice((1, 40, 1024, 1030, 2500))
    root = choices.randrange(size)
    own = ctypes.create_string_buffer(bytes([mark(rank, step)]) * n, n)
    if kind == 0:
        gathered = ctypes.create_string_buffer(n * size)
        check(c.all_gather(addressof(end), addressof(own), n, addressof(gathered)))
        assert gathered.raw == b"".join(bytes([mark(r, step)]) * n for r in range(size)), step
    elif kind == 1:
        check(c.broadcast(addressof(end), addressof(own), n, root))
        assert own.raw == bytes([mark(root, step)]) * n, step
    else:
        x = (ctypes.c_float * n)(*[mark(rank, step)] * n)
        check(c.all_reduce(addressof(end), addressof(x), n))
        assert set(x) == {sum(mark(r, step) for r in range(size))}, step
"""


def run_processes(program: str, size: int, result: str = "") -> None:
    skip_without_compiler()
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, memory_bytes(size, BUFFER_BYTES))
    shared = [str(library_path()), str(descriptor)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + program, *shared, *map(str, place), result],
            pass_fds=[descriptor],
        )
        for place in ((rank, size, BUFFER_BYTES) for rank in range(size))
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0] * size
    finally:
        os.close(descriptor)
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_taken_in_rank_order_bit_for_bit(size: int, tmp_path: Path) -> None:
    """Of one float, of just a buffer, and of several buffers."""
    run_processes(SUMS, size, f"{tmp_path}:{','.join(map(str, COUNTS))}")
    expected = b"".join(_sum_in_rank_order(size, count) for count in COUNTS)
    assert [(tmp_path / str(rank)).read_bytes() for rank in range(size)] == [expected] * size


def _sum_in_rank_order(size: int, count: int) -> bytes:
    parts = []
    for rank in range(size):
        draws = Random(f"{rank}/{count}")
        parts.append(torch.tensor([draws.gauss(0, 10) for _ in range(count)]))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return struct.pack(f"{count}f", *total.tolist())


@pytest.mark.thorough
def test_thousands_of_operations_stay_in_step_with_more_ranks_than_cores() -> None:
    run_processes(MIXED, max(4, (os.cpu_count() or 1) + 1))


def end_of(memory: mmap, rank: int, processes: list[int], limit_s: float = 30.0) -> SharedEnd:
    ops = make_ops("c")
    assert isinstance(ops, CpuOps)
    return SharedEnd(ops, memory, rank, processes, limit_s)


@pytest.mark.parametrize("operation", ["all-reduce", "all-gather", "broadcast"])
def test_a_rank_that_does_not_come_is_an_error_after_the_limit(operation: str) -> None:
    end = end_of(mmap(-1, memory_bytes(2)), 0, [NO_PROCESS] * 2, limit_s=0.2)

    def attempt() -> None:
        x = torch.ones(3)
        if operation == "broadcast":
            end.broadcast(x, root=1)
        else:
            getattr(end, operation.replace("-", "_"))(x)

    start_s = time.monotonic()
    for _ in range(3):  # a group that failed fails again, without a wait
        with pytest.raises(RuntimeError, match=f"{operation}: .* timed out"):
            attempt()
    assert 0.2 <= time.monotonic() - start_s < 30


@contextmanager
def ended_process() -> Iterator[int]:
    """A pidfd of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    descriptor = os.pidfd_open(process.pid)
    process.wait()
    yield descriptor
    os.close(descriptor)


def test_a_rank_whose_process_has_ended_is_not_waited_for() -> None:
    with ended_process() as other:
        end = end_of(mmap(-1, memory_bytes(2)), 0, [NO_PROCESS, other])
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match="all-reduce: .* has exited"):
            end.all_reduce(torch.ones(3))
        assert time.monotonic() - start_s < 15


def test_what_a_rank_gave_before_it_ended_is_taken() -> None:
    memory = mmap(-1, memory_bytes(2))
    with ended_process() as other:
        end_of(memory, 1, [NO_PROCESS] * 2).broadcast(torch.full((3,), 7.0), root=1)
        x = torch.zeros(3)
        end_of(memory, 0, [NO_PROCESS, other]).broadcast(x, root=1)
    assert x.tolist() == [7.0] * 3


def test_only_dense_float32_is_summed() -> None:
    end = end_of(mmap(-1, memory_bytes(1)), 0, [NO_PROCESS])
    for wrong in (torch.ones(2, dtype=torch.float64), torch.ones(2, 2).t()):
        with pytest.raises(TypeError, match="all-reduce takes contiguous float32"):
            end.all_reduce(wrong)


def test_a_pass_that_gathers_is_not_recorded() -> None:
    ops = make_ops("c")
    assert isinstance(ops, CpuOps)
    end = SharedEnd(ops, mmap(-1, memory_bytes(1)), 0, [NO_PROCESS], 1.0)
    weight, calls = torch.ones(16), []

    def run(x: torch.Tensor, _: RaggedBatch) -> torch.Tensor:
        calls.append(1)
        return end.all_gather(ops.rms_norm(x, weight, 1e-6))[0]

    again = ops.captured(run)
    whole, half = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    for _ in range(4):
        again(torch.randn(2, 16), RaggedBatch(whole, whole, half, half, half[None], 1, 1))
    assert len(calls) == 6  # the first one runs three times: twice to find out
