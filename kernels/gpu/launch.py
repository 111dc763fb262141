"""Overlap of consecutive kernels of a pass: each may start while the one before it ends.

With programmatic dependent launch a kernel is put on the multiprocessors as soon as every program
of its predecessor allows it; it must wait before it touches what that one writes or reads. What it
does before (computing addresses, fetching weights) is then hidden.

Every kernel of a pass first waits and then lets its successor start. So when a kernel starts, all
but its immediate predecessor have ended: what those wrote it may read before it waits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """After this, all writes of earlier kernels are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may be launched beside this one; it still waits for this one's end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(rows, LINES: tl.constexpr, PDL: tl.constexpr):
    """Have the first lines (128 bytes each) behind these pointers fetched into the cache, while a
    kernel waits for its inputs."""
    if PDL and LINES > 0:
        line = rows.to(tl.int64)[:, None] + tl.arange(0, LINES)[None, :] * 128
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [line],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_runs(starts, num_bytes, PDL: tl.constexpr):
    """Have runs of `num_bytes` (a multiple of 16, 0 for none) fetched into the cache, while a
    kernel waits for its inputs."""
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred some;
            setp.ne.u32 some, $2, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [starts.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@cache
def pdl_enabled(device: torch.device) -> bool:
    """Hopper and later have it; the interpreter has not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(pdl: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if pdl else {}
