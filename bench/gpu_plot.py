"""Draws the figures of `outrider.bench.gpu` against the roofs of the chip (needs matplotlib).

python -m outrider.bench.gpu_plot docs/results/gpu.json roofline.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from outrider.bench.gpu import kv_bytes_per_token, prefill_flops
from outrider.bench.inflate_recipes import SHAPES, inflate_spec
from outrider.workers.weights.checkpoint import load_spec
from outrider.workers.weights.resolve import draft_assets

_CONTEXT = 150  # tokens in the middle of a measured batch


class Point(NamedTuple):
    name: str
    intensity: float  # floating-point operations for each byte that must be read
    tflops: float


def points(results: dict[str, Any]) -> list[Point]:
    """What was measured, as useful operations over the bytes of weights and KV they need."""
    spec = inflate_spec(load_spec(draft_assets()), SHAPES["llama-3.1-8b"])
    weights = 2 * (spec.num_params - spec.vocab_size * spec.hidden_size)  # embeddings are looked up
    found = []

    def add(name: str, rows: int, context_tokens: float, ms: float) -> None:
        flops = weights * rows
        read = weights + context_tokens * kv_bytes_per_token(spec)
        found.append(Point(name, flops / read, flops / ms / 1e9))

    add("1 token", 1, _CONTEXT, results["plain_device_ms"])
    add("verify 6", 6, _CONTEXT, results["110m_depth5_verify_ms"])
    for size in (8, 64, 256):
        add(f"batch {size}", size, size * _CONTEXT, results[f"batch{size}_depth0_ms_per_round"])
    flops = prefill_flops(spec, 8192)
    tflops = flops / results["prefill_8192_ms"] / 1e9
    found.append(Point("prefill 8k", flops / weights, tflops))
    return found


def main(
    results: Annotated[Path, typer.Argument(help="The figures, as `bench.gpu` wrote them.")],
    out: Annotated[Path, typer.Argument(help="The picture to write, .svg or .png.")],
) -> None:
    """Draw the roofline."""
    import matplotlib.pyplot as plt

    figures = json.loads(results.read_text())
    bandwidth, rate = figures["read_tb_per_s"], figures["matrix_tflops"]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    edge, most = rate / bandwidth, 2e4
    axes.plot([0.5, edge, most], [0.5 * bandwidth, rate, rate], color="black", linewidth=1)
    for point in points(figures):
        axes.plot(point.intensity, point.tflops, "o", color="tab:blue")
        roof = min(point.intensity * bandwidth, rate)
        label = f"{point.name}, {point.tflops / roof:.0%}"
        axes.annotate(label, (point.intensity, point.tflops), (6, -11), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.set_title(f"8B shape, bfloat16, {figures['about']['device']}: share of the roof")
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
