"""The chip's limits: memory bandwidth, matrix rate, and a model's linears alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.gpu.linear import GpuLinear
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.layers import GatedMlp

_WARM_UPS = 3


def time_graph(run: Callable[[], None], repeats: int = 12) -> float:
    """Median milliseconds of a CUDA graph of `run`, by events."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return time_device(graph.replay, repeats)


def time_device(run: Callable[[], object], repeats: int = 12) -> float:
    """Median milliseconds on the device, after warm-up runs."""
    times = []
    for _ in range(_WARM_UPS + repeats):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    median: float = statistics.median(times[_WARM_UPS:])
    return median


def read_tb_per_s() -> float:
    """Read bandwidth: 4 GB summed up."""
    data = torch.randn(1 << 30, device="cuda", dtype=torch.float32).view(1 << 10, -1)
    return data.numel() * 4 / time_device(lambda: data.sum(-1)) / 1e9


def copy_tb_per_s() -> float:
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / time_device(lambda: target.copy_(source)) / 1e9


def matrix_tflops(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_device(lambda: a @ b) / 1e9


def linears_ms(decoder: Decoder, rows: int) -> float:
    """Time of all linears of a pass over `rows` tokens, LM head included: a CUDA graph for each
    shape, with the fastest of our kernels and the library's."""
    shapes: dict[torch.Size, list[GpuLinear]] = {}
    for linear in _linears(decoder):
        shapes.setdefault(linear.weight.shape, []).append(linear)
    return sum(_fastest_ms(linears, rows, decoder.dtype) for linears in shapes.values())


def _fastest_ms(linears: list[GpuLinear], rows: int, dtype: torch.dtype) -> float:
    x = torch.randn(rows, linears[0].depth, device="cuda", dtype=dtype)
    kernels: list[Callable[[GpuLinear], Tensor]] = [
        lambda linear: functional.linear(x, linear.weight),
        lambda linear: torch.mm(linear.weight, x.t()),
        lambda linear: linear(x),
    ]

    def all_with(kernel: Callable[[GpuLinear], Tensor]) -> Callable[[], None]:
        @torch.inference_mode()
        def run() -> None:
            for linear in linears:
                kernel(linear)

        return run

    return min(time_graph(all_with(kernel), repeats=6) for kernel in kernels)


def _linears(decoder: Decoder) -> list[GpuLinear]:
    found: list[object] = []
    for layer in decoder._layers:  # the decoder has no public access to its linears
        assert isinstance(layer.mlp, GatedMlp)
        found += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    return [linear for linear in (*found, decoder._head) if isinstance(linear, GpuLinear)]
