"""What the chip itself allows: bandwidth, matrix rate, and a model's linears with nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.gpu.linear import GpuLinear
from outrider.kernels.gpu.stream import MAX_SMALL_ROWS
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
    """All linears of a pass over `rows` tokens and its head, one after the other in one graph, by
    the faster of our kernels and the library's."""
    times = [time_graph(lambda: _run_linears(decoder, rows, library=True), repeats=6)]
    if rows <= MAX_SMALL_ROWS:
        times.append(time_graph(lambda: _run_linears(decoder, rows, library=False), repeats=6))
    return min(times)


@torch.inference_mode()
def _run_linears(decoder: Decoder, rows: int, *, library: bool) -> None:
    spec = decoder.spec

    def product(linear: object, x: Tensor) -> Tensor:
        assert isinstance(linear, GpuLinear)
        return functional.linear(x, linear.weight) if library else linear(x)

    x = torch.ones(rows, spec.hidden_size, device="cuda", dtype=decoder.dtype)
    for layer in decoder._layers:  # nothing else gives the linears alone
        assert isinstance(layer.mlp, GatedMlp)
        mixed = product(layer.attention.qkv, x)[:, : spec.num_heads * spec.head_dim].contiguous()
        x = product(layer.attention.out, mixed)
        x = product(
            layer.mlp.down, product(layer.mlp.gate_up, x)[:, : spec.intermediate_size].contiguous()
        )
    product(decoder._head, x)
