"""Tunes the tile configurations of GEMMs on this GPU, or leaves them to the library, and adds the
results to the table.

    PYTHONPATH=src python -m outrider.benchmarks.gpu_tune --out kernels/gpu/tuned.json
    PYTHONPATH=src python -m outrider.benchmarks.gpu_tune --out tuned.json --models 8b \\
        --rows 96,128,160,192,224,256,320,384,448,512
    PYTHONPATH=src python -m outrider.benchmarks.gpu_tune --out kernels/gpu/tuned.json --weights fp8

All candidates are compiled first, in parallel processes; then each is timed in a CUDA graph that
reads more weights than the cache holds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional

from outrider.benchmarks.gpu_floor import time_graph
from outrider.benchmarks.gpu_tune_blocks import block_candidates, library_configs
from outrider.kernels.gpu.linear import GpuLinear
from outrider.kernels.gpu.stream import MAX_SMALL_ROWS, ResidualStream
from outrider.kernels.gpu.tuning import (
    SHARED_BYTES,
    LibraryConfig,
    LinearConfig,
    LinearKind,
    ProductConfig,
    forced,
    table_key,
)
from outrider.kernels.quantized import quantize
from outrider.kernels.types import RaggedBatch

_CACHE_BYTES = 256 << 20  # several times the second-level cache
_BLOCK = 16
_LINES = 2  # best in a whole pass; a GEMM alone shows no difference


@dataclass(frozen=True)
class Product:
    """A GEMM of a decoder layer; pairs of features count once, as in the table."""

    name: str
    kind: LinearKind
    features: int
    depth: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 128
    quantization: str | None = None

    @property
    def is_8bit(self) -> bool:
        return self.quantization is not None

    @property
    def weight_bytes(self) -> int:
        return 1 if self.is_8bit else 2

    @property
    def weight_rows(self) -> int:
        return self.features * (1 if self.kind == "linear" else 2)

    @property
    def bytes(self) -> int:
        return self.weight_rows * self.depth * self.weight_bytes

    def key(self, rows: int) -> str:
        return table_key(self.kind, self.features, self.depth, rows, self.is_8bit)


PRODUCTS = {
    "70b": [
        Product("qkv", "qkv", 5120, 8192, 64, 8),
        Product("out", "linear", 8192, 8192),
        Product("gate_up", "gate_up", 28672, 8192),
        Product("down", "linear", 8192, 28672),
        Product("head", "linear", 49152, 8192),
    ],
    "8b": [
        Product("qkv", "qkv", 3072, 4096, 32, 8),
        Product("out", "linear", 4096, 4096),
        Product("gate_up", "gate_up", 14336, 4096),
        Product("down", "linear", 4096, 14336),
        Product("head", "linear", 49152, 4096),
    ],
    "1b": [
        Product("qkv", "qkv", 1536, 2048, 32, 8, 64),
        Product("out", "linear", 2048, 2048),
        Product("gate_up", "gate_up", 8192, 2048),
        Product("down", "linear", 2048, 8192),
        Product("head", "linear", 49152, 2048),
    ],
    "110m": [
        Product("qkv", "qkv", 640, 768, 12, 4, 64),
        Product("out", "linear", 768, 768),
        Product("gate_up", "gate_up", 3072, 768),
        Product("down", "linear", 768, 3072),
        Product("head", "linear", 49152, 768),
    ],
}


def candidates(item: Product, rows: int) -> Iterator[LinearConfig]:
    """Tile configurations that keep enough bytes in flight and every multiprocessor busy."""
    is_pair = item.kind != "linear"
    if rows > MAX_SMALL_ROWS:
        if item.is_8bit:  # a converted tile serves many rows
            yield from _wide_candidates(item, rows)
        else:
            yield from _block_candidates(item, rows)
        return
    splits = (1, 2, 4) if item.features <= 16384 else (1,)
    widths = (16, 32, 64) if item.bytes <= 64 << 20 else (32, 64)
    depths = (128, 256) if item.is_8bit else (64, 128, 256)
    for wide, deep, stages, parts in product(widths, depths, (3, 4, 6, 8), splits):
        stage = (wide * (2 if is_pair else 1) * item.weight_bytes + rows * 2) * deep
        programs = item.features // wide * parts
        if item.depth % (deep * parts) or not 40 << 10 <= stage * stages <= SHARED_BYTES:
            continue
        if item.bytes > 32 << 20 and programs < 96:
            continue
        yield LinearConfig(wide, deep, 4, stages, parts, _LINES)
        if stage >= 24 << 10:
            yield LinearConfig(wide, deep, 8, stages, parts, _LINES)


def _block_candidates(item: Product, rows: int) -> Iterator[LinearConfig]:
    limit = item.head_dim // 2 if item.kind == "qkv" else item.features
    is_pair = item.kind != "linear"
    yield from block_candidates(item.features, item.depth, is_pair, rows, limit)


def _wide_candidates(item: Product, rows: int) -> Iterator[LinearConfig]:
    pair = 1 if item.kind == "linear" else 2
    for wide, deep, stages, parts, warps in product(
        (32, 64, 128), (64, 128), (3, 4), (1, 2), (4, 8)
    ):
        stage = (wide * pair * item.weight_bytes + rows * 2) * deep
        sums = wide * pair * rows // (32 * warps)  # registers of a thread
        if item.depth % (deep * parts) or stage * stages > SHARED_BYTES or not 32 <= sums <= 128:
            continue
        if item.features // wide * parts >= 60:
            yield LinearConfig(wide, deep, warps, stages, parts, _LINES)


class GemmBench:
    """The operands of one GEMM, with enough weights to miss the cache."""

    def __init__(self, item: Product, rows: int, copies: int | None = None) -> None:
        self.item = item
        count = copies or max(2, -(-_CACHE_BYTES // item.bytes))
        self.linears = [_linear(item) for _ in range(count)]
        self.x = torch.randn(rows, item.depth, device="cuda", dtype=torch.bfloat16)
        residual = torch.randn(rows, item.features, device="cuda", dtype=torch.bfloat16)
        self.residual = ResidualStream(residual, residual, residual)
        squares = torch.ones(rows, 64, device="cuda")
        self.stream = ResidualStream(self.x, self.x, squares)
        self.norm = torch.ones(item.features, device="cuda", dtype=torch.bfloat16)
        self.batch = _batch(rows)
        angles = torch.rand(4096, item.head_dim // 2, device="cuda")
        self.tables = (angles.cos(), angles.sin())
        cache = (64, max(item.kv_heads, 1), _BLOCK, item.head_dim)
        self.caches = [torch.zeros(cache, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def run(self, linear: GpuLinear) -> Tensor:
        if self.item.kind == "gate_up":
            return linear.norm_gated(self.stream, 1e-5)
        if self.item.kind == "qkv":
            cos, sin = self.tables
            keys, values = self.caches
            return linear.norm_rotate_store(
                self.stream, 1e-5, cos, sin, self.batch, keys, values, self.item.heads
            )
        if self.item.name == "head":
            return linear.wide(self.x)
        return linear.add(self.x, self.residual, self.norm, 1e-5).total

    def library(self, linear: GpuLinear) -> Tensor:
        return functional.linear(self.x, linear.weight)

    def microseconds(self, run: Callable[[GpuLinear], Tensor]) -> float:
        calls = max(1, 16 // len(self.linears)) * len(self.linears)

        def all_of_them() -> None:
            for _ in range(calls // len(self.linears)):
                for linear in self.linears:
                    run(linear)

        return 1000 * time_graph(all_of_them) / calls


def _linear(item: Product) -> GpuLinear:
    shape = (item.weight_rows, item.depth)
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    return GpuLinear(quantize(weight, item.quantization) if item.quantization else weight, None)


def _batch(rows: int) -> RaggedBatch:
    at = torch.arange(rows, device="cuda")
    few = torch.zeros(1, dtype=torch.int32, device="cuda")
    return RaggedBatch(at, at, few, few, few, rows, rows)


def _compile(jobs: list[tuple[Product, int, LinearConfig]]) -> None:
    item, bench = None, None
    for job_item, rows, config in jobs:
        if bench is None or job_item != item:
            item, bench = job_item, GemmBench(job_item, rows, copies=1)
        try:
            with forced(config):
                bench.run(bench.linears[0])
        except Exception as error:  # too large for the chip: the timing run skips it, too
            print(f"{job_item.name} {config}: {str(error)[:80]}")
    torch.cuda.synchronize()


def compile_all(jobs: list[tuple[Product, int, LinearConfig]]) -> None:
    num_processes = max(1, min(14, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    shares = [jobs[i::num_processes] for i in range(num_processes)]
    workers = [
        context.Process(target=_compile, args=(sorted(share, key=lambda job: job[0].name),))
        for share in shares
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


TuneResult = list[tuple[float, ProductConfig]]


def tune(item: Product, rows: int, configs: list[LinearConfig]) -> TuneResult:
    """Candidates sorted by time; the library is among them for many rows."""
    bench = GemmBench(item, rows)
    found: TuneResult = []
    candidate_configs: list[ProductConfig] = list(configs)
    if rows >= MAX_SMALL_ROWS and not item.is_8bit:
        candidate_configs += library_configs(rows)
    for config in candidate_configs:
        try:
            with forced(config):
                found.append((bench.microseconds(bench.run), config))
        except Exception as error:
            print(f"{item.name} {config}: {str(error)[:80]}")
    found.sort(key=lambda pair: pair[0])
    best_us, best = found[0]
    # The library has no GEMM of 8-bit weights with rows of another type.
    library = "" if item.is_8bit else f", library {bench.microseconds(bench.library):7.2f} us"
    print(
        f"{item.name:8} {item.weight_rows}x{item.depth} rows {rows}: {best_us:7.2f} us "
        f"{item.bytes / best_us / 1e6:5.2f} TB/s{library}; {best}",
        flush=True,
    )
    for us, config in found[1:4]:
        print(f"         {us:7.2f} {config}")
    return found


def entry(config: ProductConfig) -> dict[str, int]:
    """The table's entry of a configuration."""
    values = {name: int(value) for name, value in asdict(config).items()}
    is_library = isinstance(config, LibraryConfig)
    optional = ("rows", "rest", "biased", "transposed")
    known = {name: value for name, value in values.items() if value or name not in optional}
    return {"library": 1} | known if is_library else known


def main(
    out: Annotated[Path, typer.Option(help="Where to write the table.")],
    models: Annotated[str, typer.Option(help="Shapes, separated by commas.")] = "70b,8b,1b,110m",
    rows: Annotated[str, typer.Option(help="Row counts, separated by commas.")] = "16,32,64",
    weights: Annotated[str, typer.Option(help="16bit, fp8 or int8.")] = "16bit",
) -> None:
    """Time all candidates for each GEMM and row count, and write the best to the table."""
    if weights not in ("16bit", "fp8", "int8"):
        raise typer.BadParameter(f"{weights!r} must be 16bit, fp8 or int8.", param_hint="--weights")
    items = [item for name in models.split(",") for item in PRODUCTS[name]]
    if weights != "16bit":
        items = [replace(item, quantization=weights) for item in items if item.name != "head"]
    counts = [int(count) for count in rows.split(",")]
    few, many = _split_at(counts, MAX_SMALL_ROWS)
    table: dict[str, dict[str, int]] = {}
    best: dict[Product, list[LinearConfig]] = {}
    for number, count in enumerate(few):
        # The best candidates of the first row count are tried with the others.
        candidate_configs = (
            best if number else {item: list(candidates(item, count)) for item in items}
        )
        if count == MAX_SMALL_ROWS and weights == "16bit":
            candidate_configs = {
                item: [*own, *_block_candidates(item, count)]
                for item, own in candidate_configs.items()
            }
        compile_all([(item, count, config) for item in items for config in candidate_configs[item]])
        for item in items:
            found = tune(item, count, candidate_configs[item])
            own = [config for _, config in found if isinstance(config, LinearConfig)]
            best.setdefault(item, own[:6])
            table[item.key(count)] = entry(found[0][1])
    blocks = [(item, count, list(candidates(item, count))) for item, count in product(items, many)]
    distinct = {
        (item, config): count
        for item, count, candidate_configs in blocks
        for config in candidate_configs
    }
    compile_all([(item, count, config) for (item, config), count in distinct.items()])
    for item, count, own in blocks:
        table[item.key(count)] = entry(tune(item, count, own)[0][1])
    write_table(out, table)


def _split_at(counts: list[int], limit: int) -> tuple[list[int], list[int]]:
    return [n for n in counts if n <= limit], [n for n in counts if n > limit]


def write_table(path: Path, found: dict[str, dict[str, int]]) -> None:
    """Update the table, one line a GEMM; other entries stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in (known | found).items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    typer.run(main)
