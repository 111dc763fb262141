"""What the chip itself allows: bandwidth, matrix rate, and a model's linears with nothing else."""

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
    """Median milliseconds of a recorded run, by events."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return time_device(graph.replay, repeats)


def time_device(run: Callable[[], object], repeats: int = 12) -> float:
    """Median milliseconds on the device, after a few runs that do not count."""
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
    """How fast 4 GB can be summed up: reading, and nothing written."""
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
    """All linears of a pass over `rows` tokens and its head with nothing in between: those of one
    shape one after the other in one graph, by the fastest of our kernels and the library's."""
    shapes: dict[torch.Size, list[GpuLinear]] = {}
    for linear in _linears(decoder):
        shapes.setdefault(linear.weight.shape, []).append(linear)
    return sum(_fastest_ms(linears, rows, decoder.dtype) for linears in shapes.values())


def _fastest_ms(linears: list[GpuLinear], rows: int, dtype: torch.dtype) -> float:
    x = torch.randn(rows, linears[0].depth, device="cuda", dtype=dtype)
    ways: list[Callable[[GpuLinear], Tensor]] = [
        lambda linear: functional.linear(x, linear.weight),
        lambda linear: torch.mm(linear.weight, x.t()),
        lambda linear: linear(x),
    ]

    def all_by(way: Callable[[GpuLinear], Tensor]) -> Callable[[], None]:
        @torch.inference_mode()
        def run() -> None:
            for linear in linears:
                way(linear)

        return run

    return min(time_graph(all_by(way), repeats=6) for way in ways)


def _linears(decoder: Decoder) -> list[GpuLinear]:
    found: list[object] = []
    for layer in decoder._layers:  # nothing else gives the linears alone
        assert isinstance(layer.mlp, GatedMlp)
        found += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    return [linear for linear in (*found, decoder._head) if isinstance(linear, GpuLinear)]
